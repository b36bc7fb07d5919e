"""What each operation on a frozen array does to its factors.

A rule takes an equation, its operands, of which one is a `View`, and the view itself.
It returns the outputs of the equation. Operations that are not in `RULES`, and that run
no programs of their own, are refused.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from dpmp.lora._products import product
from dpmp.lora._views import CannotFollowError, View
from dpmp.programs import _primitives
from dpmp.programs._interpreter import bind

Rule: TypeAlias = Callable[[Any, list[Any], View], list[Any]]


def bare(values: list[Any]) -> list[Any]:
    """The operands of an equation, with arrays in place of views."""
    return [x.array if isinstance(x, View) else x for x in values]


def _same(eqn: Any, values: list[Any], view: View) -> list[Any]:
    """Changes no axis: a cast, a copy, a name. The factors keep their dtype."""
    (array,) = bind(eqn, bare(values))
    return [view.with_array(array)]


def _barrier(eqn: Any, values: list[Any], view: View) -> list[Any]:
    return [
        x.with_array(array) if isinstance(x, View) else array
        for x, array in zip(values, bind(eqn, bare(values)), strict=True)
    ]


def _transpose(eqn: Any, values: list[Any], view: View) -> list[Any]:
    return [view.transposed(eqn.params["permutation"])]


def _reshape(eqn: Any, values: list[Any], view: View) -> list[Any]:
    return [view.reshaped(eqn.outvars[0].aval.shape)]


def _squeeze(eqn: Any, values: list[Any], view: View) -> list[Any]:
    dropped = eqn.params["dimensions"]
    view.target.note([view.labels[i] for i in dropped], "stack")
    return [view.without(dropped)]


def _broadcast(eqn: Any, values: list[Any], view: View) -> list[Any]:
    (out,) = eqn.outvars
    kept = tuple(eqn.params["broadcast_dimensions"])
    if out.aval.size != view.array.size or list(kept) != sorted(kept):
        raise CannotFollowError("broadcasts it")
    return [view.reshaped(out.aval.shape)]


def _slice(eqn: Any, values: list[Any], view: View) -> list[Any]:
    params = eqn.params
    starts, limits = params["start_indices"], params["limit_indices"]
    strides = params["strides"] or [1] * len(starts)
    (array,) = bind(eqn, bare(values))
    changes = {
        i: functools.partial(_sliced, start=start, limit=limit, stride=stride)
        for i, (start, limit, stride) in enumerate(
            zip(starts, limits, strides, strict=True)
        )
        if array.shape[i] != view.array.shape[i]
    }
    return [view.on_axes(array, changes)]


def _sliced(factor: Any, axis: int, *, start: int, limit: int, stride: int) -> Any:
    return jax.lax.slice_in_dim(factor, start, limit, stride, axis)


def _split(eqn: Any, values: list[Any], view: View) -> list[Any]:
    axis, views, start = eqn.params["axis"], [], 0
    for array in bind(eqn, bare(values)):
        limit = start + array.shape[axis]
        change = functools.partial(_sliced, start=start, limit=limit, stride=1)
        views.append(view.on_axes(array, {axis: change}))
        start = limit
    return views


def _dynamic_slice(eqn: Any, values: list[Any], view: View) -> list[Any]:
    if not isinstance(values[0], View):
        raise CannotFollowError("uses it as an index")
    (array,) = bind(eqn, bare(values))
    changes = {
        i: functools.partial(_sliced_at, start=start, size=size)
        for i, (start, size) in enumerate(zip(values[1:], array.shape, strict=True))
        if size != view.array.shape[i]
    }
    return [view.on_axes(array, changes)]


def _sliced_at(factor: Any, axis: int, *, start: Any, size: int) -> Any:
    return jax.lax.dynamic_slice_in_dim(factor, start, size, axis)


def _scale(eqn: Any, values: list[Any], view: View) -> list[Any]:
    """A product with, or a quotient by, one number."""
    is_left = isinstance(values[0], View)
    other = values[1] if is_left else values[0]
    if isinstance(other, View) or jnp.size(other) != 1:
        raise CannotFollowError("multiplies it entry by entry")
    (array,) = bind(eqn, bare(values))
    if eqn.primitive.name == _primitives.MUL:
        return [view.scaled(array, other)]
    if not is_left:
        raise CannotFollowError("divides by it")
    return [view.scaled(array, 1 / jnp.asarray(other, jnp.float32))]


def _product(eqn: Any, values: list[Any], view: View) -> list[Any]:
    if all(isinstance(x, View) for x in values):
        raise CannotFollowError("multiplies it with another target")
    return [product(eqn, values, view, is_left=isinstance(values[0], View))]


RULES: dict[str, Rule] = {
    **dict.fromkeys(_primitives.SAME_ENTRIES, _same),
    _primitives.OPTIMIZATION_BARRIER: _barrier,
    _primitives.TRANSPOSE: _transpose,
    _primitives.RESHAPE: _reshape,
    _primitives.SQUEEZE: _squeeze,
    _primitives.BROADCAST: _broadcast,
    _primitives.SLICE: _slice,
    _primitives.SPLIT: _split,
    _primitives.DYNAMIC_SLICE: _dynamic_slice,
    _primitives.MUL: _scale,
    _primitives.DIV: _scale,
    _primitives.DOT_GENERAL: _product,
}
