"""Runs a program with adapters for some of its arrays.

`RULES` has a rule for each operation that may be applied to a frozen array. The rule
applies the operation to the factors too. Its arguments are an equation, the operands,
of which one is a `View`, and this view. It returns the outputs of the equation. An
operation with neither a rule nor a program of its own is refused.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.lora._adapters import Adapters, factor_axes
from dpmp.lora._names import by_path
from dpmp.lora._views import CannotFollowError, Target, View, aligned
from dpmp.programs import bodies, interpreter, primitives
from dpmp.programs.interpreter import bind
from dpmp.programs.source_lines import source_line

Rule: TypeAlias = Callable[[Any, list[Any], View], list[Any]]


def run_with_targets(
    closed: Any,
    leaves: Sequence[Any],
    params: PyTree,
    targets: Sequence[Target],
    adapters: Adapters | None = None,
) -> list[Any]:
    """Returns the outputs of a program with the changes of adapters.

    `leaves` has the operands of the program, beginning with the parameters. Without
    adapters, only the roles of the axes of the targets are recorded.

    Raises:
      ValueError: if the program uses a target in anything but products, or not at all.
        The message names the array.
    """
    by_name = {target.path: target for target in targets}
    values = list(leaves)
    for i, path in enumerate(by_path(params)):
        if path in by_name:
            array = leaves[i]
            factors = () if adapters is None else _factors(adapters, path, array.ndim)
            origins = tuple((axis,) for axis in range(array.ndim))
            values[i] = View(array, factors, origins, by_name[path])
    outputs = _run(closed, values)
    unused = [target.path for target in targets if not target.is_used]
    _validate.require(
        not unused,
        "the function must multiply with every target, or its adapter never learns. "
        "Leave these arrays out of `targets`.",
        unused=unused,
    )
    return outputs


def _factors(adapters: Adapters, path: str, ndim: int) -> tuple[Any, ...]:
    axes = factor_axes(dict(adapters.axes)[path])
    pairs = zip(adapters.factors[path], axes, strict=True)
    return tuple(aligned(factor, own, ndim) for factor, own in pairs)


def _run(closed: Any, values: Sequence[Any]) -> list[Any]:
    def evaluate(eqn: Any, values: list[Any]) -> list[Any]:
        views = [x for x in values if isinstance(x, View)]
        if not views:
            return bind(eqn, values)
        try:
            return _evaluate(eqn, values, views[0])
        except CannotFollowError as reason:
            _refuse(eqn, views[0], str(reason))

    outputs = interpreter.run(closed, values, evaluate)
    for x in outputs:
        if isinstance(x, View):
            _refuse(None, x, "returns it")
    return outputs


def _evaluate(eqn: Any, values: list[Any], view: View) -> list[Any]:
    name = eqn.primitive.name
    if name in primitives.CALLS:
        return _run(interpreter.callee(eqn), values)
    if name == primitives.COND:
        branches = map(interpreter.inline, eqn.params["branches"])
        index, *operands = values
        return jax.lax.switch(index, [_runs(x) for x in branches], *operands)
    if (loop := bodies.as_loop(eqn)) is not None:
        return _scan(eqn, values, loop)
    if (found := bodies.as_rematerialised(eqn)) is not None:
        body, wrap = found
        return wrap(_runs(body))(*values)
    if name == primitives.CONVOLUTION:
        raise CannotFollowError("convolves with it")
    if name not in RULES:
        raise CannotFollowError("does something else with it than to multiply")
    return RULES[name](eqn, values, view)


def _runs(closed: Any) -> Callable[..., list[Any]]:
    return lambda *values: _run(closed, values)


def _scan(eqn: Any, values: list[Any], loop: bodies.Loop) -> list[Any]:
    # Literals get the dtypes that the program declares for them.
    values = [
        x if isinstance(x, View | jax.Array) else jnp.asarray(x, atom.aval.dtype)
        for x, atom in zip(values, eqn.invars, strict=True)
    ]
    consts = values[: loop.num_consts]
    carry = values[loop.num_consts : loop.num_consts + loop.num_carry]
    xs = values[loop.num_consts + loop.num_carry :]
    if any(isinstance(x, View) for x in carry):
        raise CannotFollowError("carries it from one iteration to the next")
    for x in xs:
        if isinstance(x, View):
            x.check_leading()

    def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        xs = [x.without_leading() if isinstance(x, View) else x for x in xs]
        outputs = _run(loop.body, [*consts, *carry, *xs])
        return outputs[: loop.num_carry], outputs[loop.num_carry :]

    carry, ys = jax.lax.scan(body, carry, xs, **loop.options)
    return [*carry, *ys]


def _bare(values: list[Any]) -> list[Any]:
    """The operands of an equation, with arrays in place of views."""
    return [x.array if isinstance(x, View) else x for x in values]


def _same(eqn: Any, values: list[Any], view: View) -> list[Any]:
    """Changes no axis: a cast, a copy, a name. The factors keep their dtype."""
    return [
        x.with_array(array) if isinstance(x, View) else array
        for x, array in zip(values, bind(eqn, _bare(values)), strict=True)
    ]


def _transpose(eqn: Any, values: list[Any], view: View) -> list[Any]:
    return [view.transposed(eqn.params["permutation"])]


def _reshape(eqn: Any, values: list[Any], view: View) -> list[Any]:
    return [view.reshaped(eqn.outvars[0].aval.shape)]


def _squeeze(eqn: Any, values: list[Any], view: View) -> list[Any]:
    return [view.squeezed(eqn.params["dimensions"])]


def _broadcast(eqn: Any, values: list[Any], view: View) -> list[Any]:
    (out,) = eqn.outvars
    kept = tuple(eqn.params["broadcast_dimensions"])
    if out.aval.size != view.array.size or list(kept) != sorted(kept):
        raise CannotFollowError("broadcasts it")
    return [view.reshaped(out.aval.shape)]


def _slice(eqn: Any, values: list[Any], view: View) -> list[Any]:
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or [1] * len(starts)
    (array,) = bind(eqn, _bare(values))
    cuts = {
        axis: functools.partial(
            jax.lax.slice_in_dim, start_index=start, limit_index=limit, stride=stride
        )
        for axis, (start, limit, stride) in enumerate(
            zip(starts, limits, strides, strict=True)
        )
        if array.shape[axis] != view.array.shape[axis]
    }
    return [view.cut(array, cuts)]


def _split(eqn: Any, values: list[Any], view: View) -> list[Any]:
    axis, views, start = eqn.params["axis"], [], 0
    for array in bind(eqn, _bare(values)):
        limit = start + array.shape[axis]
        cut = functools.partial(
            jax.lax.slice_in_dim, start_index=start, limit_index=limit
        )
        views.append(view.cut(array, {axis: cut}))
        start = limit
    return views


def _dynamic_slice(eqn: Any, values: list[Any], view: View) -> list[Any]:
    if not isinstance(values[0], View):
        raise CannotFollowError("uses it as an index")
    (array,) = bind(eqn, _bare(values))
    cuts = {
        axis: functools.partial(
            jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size
        )
        for axis, (start, size) in enumerate(zip(values[1:], array.shape, strict=True))
        if size != view.array.shape[axis]
    }
    return [view.cut(array, cuts)]


def _scale(eqn: Any, values: list[Any], view: View) -> list[Any]:
    """A product with, or a quotient by, one number."""
    is_left = isinstance(values[0], View)
    other = values[1] if is_left else values[0]
    if isinstance(other, View) or jnp.size(other) != 1:
        raise CannotFollowError("multiplies it entry by entry")
    (array,) = bind(eqn, _bare(values))
    if eqn.primitive.name == primitives.MUL:
        return [view.scaled(array, other)]
    if not is_left:
        raise CannotFollowError("divides by it")
    return [view.scaled(array, 1 / jnp.asarray(other, jnp.float32))]


def _product(eqn: Any, values: list[Any], view: View) -> list[Any]:
    if all(isinstance(x, View) for x in values):
        raise CannotFollowError("multiplies it with another target")
    (y,) = bind(eqn, _bare(values))
    is_left = isinstance(values[0], View)
    return [view.product(eqn, values[1] if is_left else values[0], y, is_left)]


RULES: dict[str, Rule] = {
    **dict.fromkeys(primitives.SAME_ENTRIES, _same),
    primitives.TRANSPOSE: _transpose,
    primitives.RESHAPE: _reshape,
    primitives.SQUEEZE: _squeeze,
    primitives.BROADCAST: _broadcast,
    primitives.SLICE: _slice,
    primitives.SPLIT: _split,
    primitives.DYNAMIC_SLICE: _dynamic_slice,
    primitives.MUL: _scale,
    primitives.DIV: _scale,
    primitives.DOT_GENERAL: _product,
}


def _refuse(eqn: Any, view: View, reason: str) -> NoReturn:
    operation, line, advice = None, None, ""
    if eqn is not None:
        operation = eqn.primitive.name
        line = ":".join(map(str, source_line(eqn, None)))
    if operation == primitives.CONVOLUTION:
        advice = (
            " The kernel of a convolution has no adapter: keep it frozen, or train all "
            "of it beside the adapters (docs/lora.md)."
        )
    elif view.factors:  # there are none in lora.init, which was given the function
        advice = (
            " If it has more than two axes, pass `fun` and `example_args` to "
            "lora.init, which reads their use."
        )
    _validate.fail(
        "every target of LoRA must be multiplied with, as a matrix or a stack of them",
        fix="Leave this array out of `targets`." + advice,
        target=view.target.path,
        shape=view.array.shape,
        the_function=reason,
        operation=operation,
        line=line,
    )
