"""The rules: the outer form of gradients, for equations on data and a view.

An equation that multiplies data by a view has a gradient of the outer form (`_uses`),
and a rule of its own here. `_steps` decides on all others.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpmp.engines.book_keeping import _equations
from dpmp.engines.book_keeping._uses import Factors, Outer, Sizes, Use
from dpmp.engines.book_keeping._views import View
from dpmp.programs import interpreter, primitives, rounded_products


def outer_use(eqn: Any, views: Sequence[View | None]) -> tuple[Use, int] | None:
    """Finds the use by an equation with a rule, if one of its two operands is a view.

    Returns the use, and the position of the operand to cache.
    """
    name, rule = _OUTER_RULES.get(interpreter.name(eqn), ("", None))
    known = [(i, x) for i, x in enumerate(views) if x is not None and x.leaves]
    if rule is None or len(known) != 1:
        return None
    ((operand, view),) = known
    (output,) = map(_shape, eqn.outvars)
    outer = rule(eqn, operand)
    return None if outer is None else (Use(name, view, output, outer), 1 - operand)


def _shape(atom: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


def _dot(eqn: Any, operand: int) -> Outer:
    """The rule of a dot product, which may be a float8 product of rounded operands.

    In the outer form, n stands for the contracted axes, m for the free axes of the
    view, T for the free axes of the data, and K for the batch axes.
    """
    data = 1 - operand
    shapes = [atom.aval.shape for atom in eqn.invars]
    contracted, batch = eqn.params.get(
        "dimension_numbers", rounded_products.dimension_numbers(len(shapes[0]))
    )
    free = [
        tuple(i for i in range(len(shapes[j])) if i not in (*contracted[j], *batch[j]))
        for j in (0, 1)
    ]
    k, t, n = (_num(shapes[data], x[data]) for x in (batch, free, contracted))
    m = _num(shapes[operand], free[operand])
    # Axes of the output: batch, free axes of the left operand, free axes of the right.
    start = len(batch[0])
    middle = start + len(free[0])
    free_out = range(start, middle), range(middle, middle + len(free[1]))

    def factors(x: jax.Array, cotangent: jax.Array) -> Factors:
        left = x.transpose(*batch[data], *free[data], *contracted[data])
        right = cotangent.transpose(*range(start), *free_out[data], *free_out[operand])
        return left.reshape(k, t, n), right.reshape(k, t, m)

    axes = (tuple(batch[operand]), tuple(contracted[operand]), free[operand])
    to_view = _from_axes(axes, shapes[operand])
    return Outer(_shape(eqn.invars[data]), Sizes(k, t, n, m), factors, to_view, axes)


def _num(shape: Sequence[int], axes: Iterable[int]) -> int:
    return math.prod(shape[i] for i in axes)


def _from_axes(
    axes: tuple[tuple[int, ...], ...], shape: tuple[int, ...]
) -> Callable[[jax.Array], jax.Array]:
    order = tuple(itertools.chain(*axes))

    def to_view(grad: jax.Array) -> jax.Array:
        grad = grad.reshape([shape[i] for i in order])
        return grad.transpose(np.argsort(order).tolist())

    return to_view


def _gather(eqn: Any, operand: int) -> Outer | None:
    """The rule of an embedding, which takes rows by their numbers."""
    axis = _equations.row_axis(eqn)
    if operand != 0 or axis is None:
        return None
    shape, numbers = eqn.invars[0].aval.shape, eqn.params["dimension_numbers"]
    others = tuple(i for i in range(len(shape)) if i != axis)
    mode = jax.lax.GatherScatterMode.from_any(eqn.params["mode"])
    num_rows, width = shape[axis], _num(shape, others)

    def factors(ids: jax.Array, cotangent: jax.Array) -> Factors:
        ids = ids.reshape(1, -1)
        if ids.dtype.itemsize < 4:  # the number of rows may not fit
            ids = ids.astype(jnp.int32)
        last = tuple(range(cotangent.ndim - len(others), cotangent.ndim))
        right = jnp.moveaxis(cotangent, numbers.offset_dims, last)
        right = right.reshape(1, ids.size, width)
        if mode is not jax.lax.GatherScatterMode.CLIP:
            is_row = (ids >= 0) & (ids < num_rows)
            right = jnp.where(is_row[..., None], right, jnp.zeros_like(right))
        return jnp.clip(ids, 0, num_rows - 1).astype(jnp.int32), right

    axes = ((), (axis,), others)
    ids = _shape(eqn.invars[1])
    sizes = Sizes(1, math.prod(ids.shape), num_rows, width)
    return Outer(ids, sizes, factors, _from_axes(axes, shape), axes, has_rows=True)


def _convolution(eqn: Any, operand: int) -> Outer | None:
    """The rule of a convolution: a product of channels for each place in the window.

    A part of left is the input at one place in the window.
    """
    params = eqn.params
    if operand != 1 or params["batch_group_count"] != 1:
        return None
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    shape = [eqn.invars[1].aval.shape[i] for i in numbers.rhs_spec]
    num_out, num_in, *window = shape
    geometry = _Geometry(
        groups, tuple(window), *(tuple(params[name]) for name in _Geometry._fields[2:])
    )
    batch_axis, _, *space = numbers.out_spec
    sizes = Sizes(
        groups,
        _num(eqn.outvars[0].aval.shape, (batch_axis, *space)),
        num_in * math.prod(window),
        num_out // groups,
    )

    places = np.array([*itertools.product(*map(range, window))], np.uint32)
    is_whole = len(places) == 1

    def factors(x: jax.Array, cotangent: jax.Array) -> Factors:
        right = _in_groups(cotangent.transpose(numbers.out_spec), groups)
        x = _padded(x.transpose(numbers.lhs_spec), geometry)
        return part(x, places[0]) if is_whole else x, right

    def part(x: jax.Array, place: Any) -> jax.Array:
        return _at_place(x, place, geometry)

    def to_view(grad: jax.Array) -> jax.Array:
        # Axes: groups, places in the window, input channels, output channels.
        grad = grad.reshape(groups, *window, num_in, -1)
        last = grad.ndim - 1
        grad = grad.transpose(0, last, last - 1, *range(1, last - 1)).reshape(shape)
        return grad.transpose(np.argsort(numbers.rhs_spec).tolist())

    outer = Outer(_shape(eqn.invars[0]), sizes, factors, to_view, None)
    return outer if is_whole else dataclasses.replace(outer, places=places, part=part)


class _Geometry(NamedTuple):
    """The geometry of a convolution: its groups, its window, and parameters of jax."""

    groups: int
    window: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    window_strides: tuple[int, ...]


@functools.partial(jax.jit, static_argnums=1)  # one copy for all layers of one shape
def _padded(x: jax.Array, geometry: _Geometry) -> jax.Array:
    """The input with padding and dilation: (batch, channels, *space)."""
    padding = [
        (low, high, n - 1)
        for (low, high), n in zip(geometry.padding, geometry.lhs_dilation, strict=True)
    ]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * 2 + padding)


@functools.partial(jax.jit, static_argnums=2)
def _at_place(x: jax.Array, place: Any, geometry: _Geometry) -> jax.Array:
    """The padded input at one place in the window: (groups, positions, channels)."""
    steps = geometry.rhs_dilation
    # The distances from the last place in the window to the end of the input.
    left = [
        size - (n - 1) * step
        for size, n, step in zip(x.shape[2:], geometry.window, steps, strict=True)
    ]
    zero = np.uint32(0)
    starts = [zero, zero, *(place[i] * np.uint32(n) for i, n in enumerate(steps))]
    seen = jax.lax.dynamic_slice(x, starts, (*x.shape[:2], *left))
    seen = jax.lax.slice(
        seen, [0] * x.ndim, seen.shape, (1, 1, *geometry.window_strides)
    )
    return _in_groups(seen, geometry.groups)


def _in_groups(x: jax.Array, groups: int) -> jax.Array:
    """(batch, channels, *space) to (groups, positions, channels)."""
    batch_size, num_channels = x.shape[:2]
    x = x.reshape(batch_size, groups, num_channels // groups, -1)
    return jax.lax.collapse(x.transpose(1, 0, 3, 2), 1, 3)


# For the name of an equation: the name of its rule in tables, and a function that
# returns the outer form of the gradient with respect to an operand, or None.
_OUTER_RULES: dict[str, tuple[str, Callable[[Any, int], Outer | None]]] = {
    primitives.DOT_GENERAL: ("dot", _dot),
    interpreter.CUSTOM_VJP + rounded_products.PRODUCT_NAME: ("dot", _dot),
    primitives.GATHER: ("gather", _gather),
    primitives.CONVOLUTION: ("convolution", _convolution),
}
