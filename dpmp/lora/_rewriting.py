"""Runs a function with adapters for some of its arrays.

`RULES` has a rule for each operation that may be applied to a frozen array. The rule
applies the operation to the factors. Its arguments are an equation, the operands, of
which one is a `View`, this view, and the outputs for the arrays alone. It returns the
outputs with their factors. An operation with neither a rule nor a program of its own is
refused.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.lora._adapters import Adapters, factor_axes
from dpmp.lora._names import by_path
from dpmp.lora._quantised import (
    check_leading,
    dequantised,
    is_quantised,
    shape_of,
)
from dpmp.lora._views import CannotFollowError, Target, View, aligned
from dpmp.programs import interpreter, primitives
from dpmp.programs.interpreter import bind
from dpmp.programs.source_lines import source_line

Rule: TypeAlias = Callable[[Any, list[Any], View, list[Any]], list[Any]]


def run_with_targets(
    fun: Callable[..., PyTree],
    args: Sequence[PyTree],
    targets: Sequence[Target],
    adapters: Adapters | None = None,
) -> PyTree:
    """Returns `fun(*args)` with the changes of adapters to the parameters, `args[0]`.

    Without adapters, only the roles of the axes of the targets are recorded.
    """
    whole = jax.tree.map(shape_of, args, is_leaf=is_quantised)
    closed, treedef = interpreter.trace(fun, *whole)
    by_name = {target.path: target for target in targets}
    values = jax.tree.leaves(args, is_leaf=is_quantised)
    for i, (path, array) in enumerate(by_path(args[0]).items()):
        if path in by_name:
            ndim = len(array.shape)
            factors = () if adapters is None else _factors(adapters, path, ndim)
            origins = tuple((axis,) for axis in range(ndim))
            values[i] = View(values[i], factors, origins, by_name[path])
    outputs = _run_to_arrays(closed, values)
    unused = [target.path for target in targets if not target.is_used]
    if unused:
        _validate.fail(
            "the function must multiply with every target, or its adapter never "
            "learns. Leave these arrays out of `targets`.",
            unused=unused,
        )
    return jax.tree.unflatten(treedef, outputs)


def _factors(adapters: Adapters, path: str, ndim: int) -> tuple[Any, ...]:
    axes = factor_axes(dict(adapters.axes)[path])
    pairs = zip(adapters.factors[path], axes, strict=True)
    return tuple(aligned(factor, own, ndim) for factor, own in pairs)


def _run(closed: Any, values: Sequence[Any]) -> list[Any]:
    def evaluate(eqn: Any, values: list[Any]) -> list[Any] | None:
        if not any(isinstance(x, View) or is_quantised(x) for x in values):
            return None
        try:
            return _evaluate(eqn, values)
        except CannotFollowError as reason:
            view = next(x for x in values if isinstance(x, View))
            _refuse(eqn, view, str(reason))

    return interpreter.run(closed, values, evaluate)


def _run_to_arrays(closed: Any, values: Sequence[Any]) -> list[Any]:
    """Refuses a target among the outputs, whose change would be lost."""
    outputs = _run(closed, values)
    for x in outputs:
        if isinstance(x, View):
            _refuse(None, x, "returns it")
    return outputs


def _evaluate(eqn: Any, values: list[Any]) -> list[Any]:
    name = eqn.primitive.name
    if name == primitives.COND:
        branches = map(interpreter.inline, eqn.params["branches"])
        runs = [lambda *xs, body=body: _run_to_arrays(body, xs) for body in branches]
        return jax.lax.switch(values[0], runs, *values[1:])
    if (loop := interpreter.as_loop(eqn)) is not None:
        return _scan(eqn, values, loop)
    if (found := interpreter.as_rematerialised(eqn)) is not None:
        body, wrap = found
        # It may return a target: `nnx.remat` returns all parameters of its module.
        return wrap(lambda *xs: _run(body, xs))(*values)
    values = list(map(_dequantised, values))
    views = [x for x in values if isinstance(x, View)]
    if not views:
        return bind(eqn, values)
    if name == primitives.CONVOLUTION:
        raise CannotFollowError("convolves with it")
    if name not in RULES:
        raise CannotFollowError("does something else with it than to multiply")
    arrays = bind(eqn, [x.array if isinstance(x, View) else x for x in values])
    return RULES[name](eqn, values, views[0], arrays)


def _dequantised(x: Any) -> Any:
    if isinstance(x, View):
        return dataclasses.replace(x, array=dequantised(x.array))
    return dequantised(x)


def _scan(eqn: Any, values: list[Any], loop: interpreter.Loop) -> list[Any]:
    # Literals get the dtypes that the program declares for them.
    values = [
        jnp.asarray(x, atom.aval.dtype) if interpreter.is_literal(atom) else x
        for x, atom in zip(values, eqn.invars, strict=True)
    ]
    end_of_carry = loop.num_consts + loop.num_carry
    consts, xs = values[: loop.num_consts], values[end_of_carry:]
    carry = list(map(dequantised, values[loop.num_consts : end_of_carry]))
    if any(isinstance(x, View) for x in carry):
        raise CannotFollowError("carries it from one iteration to the next")
    for x in xs:
        check_leading(x.array if isinstance(x, View) else x)
        if isinstance(x, View):
            x.check_leading()

    def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        slices = [
            dataclasses.replace(x, origins=x.origins[1:]) if isinstance(x, View) else x
            for x in xs
        ]
        outputs = _run_to_arrays(loop.body, [*consts, *carry, *slices])
        return outputs[: loop.num_carry], outputs[loop.num_carry :]

    carry, ys = jax.lax.scan(body, carry, xs, **loop.options)
    return [*carry, *ys]


def _same(eqn: Any, values: list[Any], view: View, arrays: list[Any]) -> list[Any]:
    """Changes no axis: a cast, a copy, a name. The factors keep their dtype."""
    # An operation on several operands at once returns as many.
    outputs = [
        dataclasses.replace(x, array=array) if isinstance(x, View) else array
        for x, array in zip(values, arrays, strict=True)
    ]
    views = [x for x in outputs if isinstance(x, View)]
    if not all(jnp.issubdtype(x.array.dtype, jnp.floating) for x in views):
        raise CannotFollowError("rounds it to integers")
    return outputs


def _transpose(eqn: Any, values: list[Any], view: View, arrays: list[Any]) -> list[Any]:
    return [view.transposed(arrays[0], eqn.params["permutation"])]


def _reshape(eqn: Any, values: list[Any], view: View, arrays: list[Any]) -> list[Any]:
    """A reshape, or a squeeze or broadcast that adds or removes axes of size one."""
    order = list(eqn.params.get("broadcast_dimensions", ()))
    if arrays[0].size != view.array.size or order != sorted(order):
        raise CannotFollowError("broadcasts it")
    return [view.reshaped(arrays[0])]


def _slice(eqn: Any, values: list[Any], view: View, arrays: list[Any]) -> list[Any]:
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or [1] * len(starts)

    def cut(x: Any, axis: int) -> Any:
        return jax.lax.slice_in_dim(x, starts[axis], limits[axis], strides[axis], axis)

    return [view.cut(arrays[0], cut)]


def _split(eqn: Any, values: list[Any], view: View, arrays: list[Any]) -> list[Any]:
    starts = np.cumsum([0, *eqn.params["sizes"]]).tolist()

    def part(start: int, limit: int) -> Callable[[Any, int], Any]:
        return lambda x, axis: jax.lax.slice_in_dim(x, start, limit, axis=axis)

    return [*map(view.cut, arrays, map(part, starts, starts[1:]))]


def _dynamic_slice(
    eqn: Any, values: list[Any], view: View, arrays: list[Any]
) -> list[Any]:
    if not isinstance(values[0], View):
        raise CannotFollowError("uses it as an index")
    starts, sizes = values[1:], eqn.params["slice_sizes"]

    def cut(x: Any, axis: int) -> Any:
        return jax.lax.dynamic_slice_in_dim(x, starts[axis], sizes[axis], axis)

    return [view.cut(arrays[0], cut)]


def _scale(eqn: Any, values: list[Any], view: View, arrays: list[Any]) -> list[Any]:
    """A product with, or a quotient by, one number."""
    is_left = isinstance(values[0], View)
    number = values[1] if is_left else values[0]
    if isinstance(number, View) or jnp.size(number) != 1:
        raise CannotFollowError("multiplies it entry by entry")
    if eqn.primitive.name == primitives.DIV:
        if not is_left:
            raise CannotFollowError("divides by it")
        number = 1 / jnp.asarray(number, jnp.float32)
    factors = view.factors
    if factors:
        a, b = factors
        factors = (a * jnp.reshape(number, ()).astype(a.dtype), b)
    return [dataclasses.replace(view, array=arrays[0], factors=factors)]


def _product(eqn: Any, values: list[Any], view: View, arrays: list[Any]) -> list[Any]:
    if all(isinstance(x, View) for x in values):
        raise CannotFollowError("multiplies it with another target")
    is_left = isinstance(values[0], View)
    return [view.product(eqn, values[1] if is_left else values[0], arrays[0], is_left)]


RULES: dict[str, Rule] = {
    **dict.fromkeys(primitives.SAME_ENTRIES, _same),
    primitives.TRANSPOSE: _transpose,
    primitives.RESHAPE: _reshape,
    primitives.SQUEEZE: _reshape,
    primitives.BROADCAST: _reshape,
    primitives.SLICE: _slice,
    primitives.SPLIT: _split,
    primitives.DYNAMIC_SLICE: _dynamic_slice,
    primitives.MUL: _scale,
    primitives.DIV: _scale,
    primitives.DOT_GENERAL: _product,
}


def _refuse(eqn: Any, view: View, reason: str) -> NoReturn:
    operation = None if eqn is None else eqn.primitive.name
    file, number = ("", 0) if eqn is None else source_line(eqn, None)
    advice = ""
    if operation == primitives.CONVOLUTION:
        advice = (
            " The kernel of a convolution has no adapter: keep it frozen, or train all "
            "of it beside the adapters (docs/lora.md)."
        )
    elif operation == primitives.STOP_GRADIENT:
        advice = " Or remove stop_gradient: dpmp keeps the array itself frozen."
    elif operation == primitives.GATHER:
        advice = " A table has no adapter, because its rows are looked up."
    elif view.factors:  # there are none in lora.init, which was given the function
        advice = (
            " If the last two axes are not its inputs and outputs, pass `fun` and "
            "`example_args` to lora.init, which reads their use."
        )
    _validate.fail(
        "every target of LoRA must be multiplied with, as a matrix or a stack of "
        f"them. Leave this array out of `targets`.{advice}",
        target=view.target.path,
        shape=view.array.shape,
        the_function=reason,
        operation=operation,
        line=f"{file}:{number}" if number else None,
    )
