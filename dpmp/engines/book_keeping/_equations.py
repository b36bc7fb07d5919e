"""Single equations: their values in float32, and how gradients go back through them."""

from collections.abc import Sequence
from typing import Any

import jax

from dpmp.engines.book_keeping._linalg import is_float, widen
from dpmp.numerics import at_least_float32
from dpmp.programs import analysis, interpreter, primitives


def goes_back_exactly(eqn: Any) -> bool:
    """Whether gradients go back through an equation linearly, and in float32.

    Norms are computed from gradients that are sent back for each example, and sums are
    sent back for all examples at once: the two agree only if sending back is linear. A
    custom rule may round or clip its cotangent, and other bodies have dtypes written in
    them, which may be below float32.
    """
    name, dtypes = eqn.primitive.name, [v.aval.dtype for v in eqn.invars]
    if name.startswith(primitives.SCATTER):
        return all(x.itemsize >= 4 for x in dtypes if is_float(x))
    # A while loop sends no gradients back.
    is_linear = not analysis.has_body(eqn) and name != primitives.REDUCE_PRECISION
    return is_linear or name == primitives.WHILE or returns_cotangent(eqn)


def returns_cotangent(eqn: Any) -> bool:
    """Whether a custom derivative is that of the identity, as for rounded weights."""
    if eqn.primitive.name not in primitives.CUSTOM:
        return False
    (given, *others), (made, *more) = eqn.invars, eqn.outvars
    aval = given.aval
    is_alone = not others and not more and is_float(aval.dtype)
    if not is_alone or (aval.shape, aval.dtype) != (made.aval.shape, made.aval.dtype):
        return False

    def pull_back(x: jax.Array, cotangent: jax.Array) -> list[jax.Array]:
        _, vjp = jax.vjp(lambda x: interpreter.bind(eqn, [x])[0], x)
        return vjp(cotangent)

    closed = jax.make_jaxpr(pull_back)(aval, aval)
    is_pure = not closed.effects
    return is_pure and closed.jaxpr.outvars == closed.jaxpr.invars[1:]


def bind_in_float32(eqn: Any, values: Sequence[jax.Array]) -> list[jax.Array]:
    """Evaluates an equation without casts of gradients to less than float32."""
    if eqn.primitive.name in primitives.CUSTOM:  # it `returns_cotangent`
        (x,), (result,) = values, bind_as_written(eqn, values)
        return [jax.lax.stop_gradient(widen(result)) + (x - jax.lax.stop_gradient(x))]
    as_written = analysis.has_body(eqn) or eqn.primitive.name == primitives.BITCAST
    return (bind_as_written if as_written else bind_widened)(eqn, values)


def bind_as_written(eqn: Any, values: Sequence[jax.Array]) -> list[Any]:
    """Evaluates an equation on operands with the dtypes that the program gives them."""
    avals = [atom.aval for atom in eqn.invars]
    values = [x.astype(aval.dtype) for x, aval in zip(values, avals, strict=True)]
    return interpreter.bind(eqn, values)


def bind_widened(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluates an equation without a body, with all floats in float32 or wider."""
    changed: dict[str, Any] = {
        name: at_least_float32(eqn.params[name])
        for name in ("new_dtype", "preferred_element_type", "out_dtype")
        if eqn.params.get(name) is not None and is_float(eqn.params[name])
    }
    if eqn.primitive.name in primitives.PRODUCTS:
        changed["precision"] = jax.lax.Precision.HIGHEST
    return interpreter.bind(eqn, [widen(x) for x in values], **changed)


def row_axis(eqn: Any) -> int | None:
    """The axis along which a gather takes rows, or None if it does not take rows."""
    numbers, shape = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
    rows = numbers.start_index_map
    takes_rows = (
        len(rows) == 1
        and numbers.collapsed_slice_dims == rows
        and not numbers.operand_batching_dims
        and eqn.params["slice_sizes"]
        == tuple(1 if i in rows else n for i, n in enumerate(shape))
    )
    return rows[0] if takes_rows else None
