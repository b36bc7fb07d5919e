"""Products whose operands are rounded to few bits, in losses and their gradients.

The operands of a product are rounded to a format, and so is the cotangent of its
result. The product is then taken in the dtype of the operands, which emulates the
format, or in 8 bits. Which format a product has depends on the parameter that it
multiplies by: the walk follows parameters through casts, transpositions, reshapes and
slices.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from dpmp._typing import PyTree
from dpmp.programs import analysis, float8, formats, interpreter, primitives

# For each value, the number of the parameter that it is a view of, or None.
Origins: TypeAlias = Sequence[int | None]

# A view of a parameter has its entries alone. The rows of an embedding are data.
_MIXED = {primitives.CONCATENATE, primitives.GATHER, primitives.SELECT}
_FOLLOWED = {*primitives.MOVES, *primitives.SAME_ENTRIES} - _MIXED


class Choice(NamedTuple):
    """The format of a product, and whether it is rounded in this step.

    `is_rounded` is a number, 0 or 1, which may be traced; None for always.
    """

    format: str
    is_rounded: jax.Array | None = None


def with_rounded_products(
    fun: Callable[..., PyTree],
    choose: Callable[[int | None], Choice | None],
    *,
    widest: Any = jnp.float32,
    native: bool | None = None,
) -> Callable[..., PyTree]:
    """Makes `fun` compute its products with rounded operands, also in its gradient.

    Functions with derivatives of their own (`jax.custom_jvp`, `jax.custom_vjp`) stay as
    they are.

    Args:
      fun: a traceable function. It takes one example if scales are to depend on one.
      choose: returns what happens to a product, given the number of the parameter (a
        leaf of the first argument) that it multiplies by, or None if it multiplies by
        none. It returns None to leave the product as it is.
      widest: a product with an operand of a wider dtype stays as it is, and so does one
        of float64.
      native: whether the device computes dot products with 8-bit numbers; None asks
        `float8.is_native`. Only the format "float8" is ever taken in 8 bits.
    """
    largest_size = min(jnp.dtype(widest).itemsize, 4)

    def run(origins: Origins, closed: Any, values: Sequence[Any]) -> list[Any]:
        known = dict(zip(closed.jaxpr.invars, origins, strict=True))

        def origins_of(atoms: Sequence[Any]) -> Origins:
            return [
                None if x is None or interpreter.is_literal(x) else known.get(x)
                for x in atoms
            ]

        def evaluate(eqn: Any, values: list[Any]) -> list[Any]:
            own = [x for x in origins_of(eqn.invars) if x is not None]
            if own and eqn.primitive.name in _FOLLOWED:
                known.update(dict.fromkeys(eqn.outvars, own[0]))
            if _is_product(eqn, largest_size):
                choice = choose(own[-1] if own else None)
                if choice is not None:
                    return _product(eqn, choice, values, native)
            inner = {
                id(x.jaxpr): origins_of(x.invars) for x in analysis.sub_programs(eqn)
            }

            def run_body(body: Any, values: Sequence[Any]) -> list[Any]:
                # The body of a scan may have been traced again.
                unknown = [None] * len(values)
                only = next(iter(inner.values())) if len(inner) == 1 else unknown
                return run(inner.get(id(body.jaxpr), only), body, values)

            return interpreter.bind_bodies(eqn, values, run_body)

        return interpreter.run(closed, values, evaluate)

    @functools.wraps(fun)
    def rounded_fun(*args: Any, **kwargs: Any) -> PyTree:
        closed, treedef = interpreter.trace(lambda *xs: fun(*xs, **kwargs), *args)
        leaves = jax.tree.leaves(args)
        number = len(jax.tree.leaves(args[:1]))
        origins = [*range(number), *[None] * (len(leaves) - number)]
        return jax.tree.unflatten(treedef, run(origins, closed, leaves))

    return rounded_fun


def _is_product(eqn: Any, largest_size: int) -> bool:
    if eqn.primitive.name not in primitives.PRODUCTS:
        return False
    dtypes = [v.aval.dtype for v in eqn.invars]
    return all(
        jnp.issubdtype(x, jnp.floating) and x.itemsize <= largest_size for x in dtypes
    )


def _product(
    eqn: Any, choice: Choice, values: list[Any], native: bool | None
) -> list[Any]:
    *axes, axis_of_result = _axes(eqn)
    operands = [
        _with_rounded_value(x, choice, axis)
        for x, axis in zip(values, axes, strict=True)
    ]
    is_dot = eqn.primitive.name == primitives.DOT_GENERAL
    can_be_native = is_dot and choice.format == "float8" and choice.is_rounded is None
    if can_be_native and (float8.is_native() if native is None else native):
        result = float8.dot_general(eqn, *operands)
    else:
        (result,) = interpreter.bind(eqn, operands)
    rounded = _with_rounded_cotangent(
        choice.format, axis_of_result, choice.is_rounded, result
    )
    return [rounded]


def _axes(eqn: Any) -> tuple[int, ...]:
    """The axes of the operands and the result along which blocks follow each other.

    In an operand, it is an axis that is contracted.
    """
    numbers = eqn.params["dimension_numbers"]
    if eqn.primitive.name != primitives.DOT_GENERAL:
        return numbers.lhs_spec[1], numbers.rhs_spec[1], numbers.out_spec[1]
    contracted, _ = numbers
    return *(own[-1] if own else -1 for own in contracted), -1


def _with_rounded_value(x: jax.Array, choice: Choice, axis: int) -> jax.Array:
    """Rounds a value; gradients pass as if it had not been rounded."""
    form, constant = formats.FORMATS[choice.format], jax.lax.stop_gradient(x)
    rounded = formats.round_to(constant, form.operands, form.block, axis)
    return _if(choice.is_rounded, rounded, constant) + (x - constant)


def _if(is_rounded: jax.Array | None, rounded: jax.Array, x: jax.Array) -> jax.Array:
    return rounded if is_rounded is None else jnp.where(is_rounded > 0, rounded, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_rounded_cotangent(
    format: str, axis: int, is_rounded: Any, x: jax.Array
) -> jax.Array:
    del format, axis, is_rounded
    return x


def _backward(
    format: str, axis: int, is_rounded: Any, ct: jax.Array
) -> tuple[Any, jax.Array]:
    form = formats.FORMATS[format]
    no_gradient = None if is_rounded is None else jnp.zeros_like(is_rounded)
    if form.cotangents is None:
        return no_gradient, ct
    rounded = formats.round_to(
        ct, form.cotangents, form.block, axis, dithers=form.dithers
    )
    return no_gradient, _if(is_rounded, rounded, ct)


def _forward(
    format: str, axis: int, is_rounded: Any, x: jax.Array
) -> tuple[jax.Array, Any]:
    del format, axis
    return x, is_rounded


_with_rounded_cotangent.defvjp(_forward, _backward)
