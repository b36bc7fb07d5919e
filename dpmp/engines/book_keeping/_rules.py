"""The rules: which sites an equation on data and views makes.

An equation that multiplies data by a view has a gradient of the outer form (`_sites`),
and a rule of its own here. Every other equation gets a tap, which is exact. A tap
returns its argument unchanged, and gives out the cotangent that comes back to it. There
are two taps:

- `tap_dense` takes the gradient of one equation without a body, in float32.
- `tap` takes the gradient of the view itself, in the dtype of the view, through all
  equations that follow. A view with this tap is "tapped whole".
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpmp.engines.book_keeping import _views
from dpmp.engines.book_keeping._sites import Outer
from dpmp.engines.book_keeping._views import View
from dpmp.programs import _float8_product, _interpreter


class OuterRule(NamedTuple):
    """The result of a rule, for an equation whose gradient is a sum of outer products.

    Attributes:
      name: for people.
      operand: the position of the operand that is the view.
      record: the position of the operand to record.
      outer: the form of the gradient, as a function of that record and the output's
        cotangent.
    """

    name: str
    operand: int
    record: int
    outer: Outer


def outer_rule(eqn: Any, operands: Sequence[View | None]) -> OuterRule | None:
    """Finds the rule of an equation, if it has one and exactly one operand is a view.

    Args:
      eqn: the equation.
      operands: for each operand the view that it is, or None for data.
    """
    rule = _OUTER_RULES.get(_interpreter.name(eqn))
    which = [i for i, view in enumerate(operands) if view is not None and view.leaves]
    return None if rule is None or len(which) != 1 else rule(eqn, which[0])


def _dot_general(eqn: Any, operand: int) -> OuterRule:
    return _dot(eqn, operand, eqn.params["dimension_numbers"])


def _dot_of_float8(eqn: Any, operand: int) -> OuterRule:
    """Treats a float8 product as a dot product: its operands are already rounded."""
    ndim = eqn.invars[operand].aval.ndim
    return _dot(eqn, operand, _float8_product.dimension_numbers(ndim))


def _dot(eqn: Any, operand: int, dimension_numbers: Any) -> OuterRule:
    """The rule of a dot product.

    In the outer form, n stands for the contracted axes, m for the free axes of the
    view, T for the free axes of the data, and K for the batch axes.
    """
    contracting, batch = dimension_numbers
    data = 1 - operand
    shapes = [atom.aval.shape for atom in eqn.invars]
    free = [
        tuple(i for i in range(len(shapes[j])) if i not in (*contracting[j], *batch[j]))
        for j in (0, 1)
    ]
    sizes = [math.prod(shapes[data][i] for i in batch[data])]
    sizes += [math.prod(shapes[data][i] for i in free[data])]
    num_left = math.prod(shapes[data][i] for i in contracting[data])
    num_right = math.prod(shapes[operand][i] for i in free[operand])
    num_batch = len(batch[data])
    # Axes of the output: batch, free ones of the left operand, free ones of the right.
    num_free = [len(free[0]), len(free[1])]
    starts = [num_batch, num_batch + num_free[0]]
    free_out = [
        tuple(range(start, start + n))
        for start, n in zip(starts, num_free, strict=True)
    ]

    def factors(records: list[jax.Array], cotangent: jax.Array) -> Any:
        (x,) = records
        left = x.transpose(*batch[data], *free[data], *contracting[data])
        order = (*range(num_batch), *free_out[data], *free_out[operand])
        right = cotangent.transpose(order)
        return [left.reshape(*sizes, num_left)], right.reshape(*sizes, num_right)

    axes = (tuple(batch[operand]), tuple(contracting[operand]), free[operand])
    to_view = _from_axes(axes, shapes[operand])
    return OuterRule("dot", operand, data, Outer(factors, to_view, axes))


def _from_axes(
    axes: tuple[tuple[int, ...], ...], shape: tuple[int, ...]
) -> Callable[[jax.Array], jax.Array]:
    order = tuple(itertools.chain(*axes))

    def to_view(grad: jax.Array) -> jax.Array:
        grad = grad.reshape([shape[i] for i in order])
        return grad.transpose(np.argsort(order).tolist())

    return to_view


def _gather(eqn: Any, operand: int) -> OuterRule | None:
    """The rule of an embedding, which takes rows by their numbers."""
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    shape = eqn.invars[0].aval.shape
    rows = numbers.start_index_map
    takes_rows = (
        operand == 0
        and len(rows) == 1
        and numbers.collapsed_slice_dims == rows
        and not numbers.operand_batching_dims
    )
    if not takes_rows:
        return None
    (row,) = rows
    others = tuple(i for i in range(len(shape)) if i != row)
    if params["slice_sizes"] != tuple(
        1 if i == row else n for i, n in enumerate(shape)
    ):
        return None
    mode = jax.lax.GatherScatterMode.from_any(params["mode"])
    num_rows, offset_dims = shape[row], numbers.offset_dims

    def factors(records: list[jax.Array], cotangent: jax.Array) -> Any:
        ids = records[0].reshape(1, -1)
        if ids.dtype.itemsize < 4:  # the number of rows may not fit
            ids = ids.astype(jnp.int32)
        last = tuple(range(cotangent.ndim - len(offset_dims), cotangent.ndim))
        right = jnp.moveaxis(cotangent, offset_dims, last)
        right = right.reshape(1, ids.size, math.prod(shape[i] for i in others))
        if mode is not jax.lax.GatherScatterMode.CLIP:
            is_row = (ids >= 0) & (ids < num_rows)
            right = jnp.where(is_row[..., None], right, jnp.zeros_like(right))
        return [jnp.clip(ids, 0, num_rows - 1).astype(jnp.int32)], right

    axes = ((), (row,), others)
    outer = Outer(factors, _from_axes(axes, shape), axes, num_rows=num_rows)
    return OuterRule("gather", operand, 1, outer)


def _convolution(eqn: Any, operand: int) -> OuterRule | None:
    """The rule of a convolution: a product of channels for each place in the window."""
    params = eqn.params
    if operand != 1 or params["batch_group_count"] != 1:
        return None
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    shape = [eqn.invars[1].aval.shape[i] for i in numbers.rhs_spec]
    num_in, *window = shape[1:]
    geometry = _Geometry(
        groups, tuple(window), *(tuple(params[name]) for name in _Geometry._fields[2:])
    )

    def factors(records: list[jax.Array], cotangent: jax.Array) -> Any:
        x = records[0].transpose(numbers.lhs_spec)
        right = _in_groups(cotangent.transpose(numbers.out_spec), groups)
        return _seen_from_each_place(x, geometry), right

    def to_view(grad: jax.Array) -> jax.Array:
        # Axes: groups, places in the window, input channels, output channels.
        grad = grad.reshape(groups, *window, num_in, -1)
        last = grad.ndim - 1
        grad = grad.transpose(0, last, last - 1, *range(1, last - 1)).reshape(shape)
        return grad.transpose(np.argsort(numbers.rhs_spec).tolist())

    return OuterRule("convolution", operand, 0, Outer(factors, to_view, None))


class _Geometry(NamedTuple):
    """What a convolution sees: its groups, its window, and parameters of jax."""

    groups: int
    window: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    window_strides: tuple[int, ...]


@functools.partial(jax.jit, static_argnums=1)  # one copy for all layers of one shape
def _seen_from_each_place(x: jax.Array, geometry: _Geometry) -> list[jax.Array]:
    """The input at each place in the window: (groups, positions, channels) each."""
    padding = [(0, 0, 0)] * 2 + [
        (low, high, dilation - 1)
        for (low, high), dilation in zip(
            geometry.padding, geometry.lhs_dilation, strict=True
        )
    ]
    padded = jax.lax.pad(x, jnp.zeros((), x.dtype), padding)
    window, strides = geometry.window, geometry.window_strides
    steps = geometry.rhs_dilation
    spans = [(n - 1) * step for n, step in zip(window, steps, strict=True)]
    num_out = [
        (n - span - 1) // stride + 1
        for n, span, stride in zip(padded.shape[2:], spans, strides, strict=True)
    ]
    seen = []
    for place in itertools.product(*map(range, window)):
        starts = [i * step for i, step in zip(place, steps, strict=True)]
        limits = [
            start + (n - 1) * stride + 1
            for start, n, stride in zip(starts, num_out, strides, strict=True)
        ]
        corner, end = (0, 0, *starts), (*padded.shape[:2], *limits)
        at_place = jax.lax.slice(padded, corner, end, (1, 1, *strides))
        seen.append(_in_groups(at_place, geometry.groups))
    return seen


def _in_groups(x: jax.Array, groups: int) -> jax.Array:
    """(batch, channels, *space) to (groups, positions, channels)."""
    batch_size, num_channels = x.shape[:2]
    x = x.reshape(batch_size, groups, num_channels // groups, -1)
    return jax.lax.collapse(x.transpose(1, 0, 3, 2), 1, 3)


_OUTER_RULES = {
    "dot_general": _dot_general,
    _interpreter.CUSTOM_VJP + _float8_product.NAME: _dot_of_float8,
    "gather": _gather,
    "conv_general_dilated": _convolution,
}


@jax.custom_vjp
def tap(value: jax.Array, dummy: jax.Array) -> jax.Array:
    """Returns `value`; its cotangent comes out as that of `dummy`."""
    del dummy
    return value


tap.defvjp(lambda value, _: (value, None), lambda _, ct: (ct, ct))


class Operand(NamedTuple):
    """An operand that is a view.

    Attributes:
      position: the position among the operands.
      shape: the shape of the view to tap.
      broadcast: the shape and dimensions of a broadcast that turns the view into the
        operand, or None. The gradient of the view is then a sum, taken in float32.
    """

    position: int
    shape: tuple[int, ...]
    broadcast: tuple[tuple[int, ...], tuple[int, ...]] | None

    def shrink(self, value: jax.Array) -> jax.Array:
        """Turns the value of the operand into that of the view."""
        if self.broadcast is None:
            return value
        sizes = dict(zip(self.broadcast[1], self.shape, strict=True))
        return value[
            tuple(slice(sizes[i]) if i in sizes else 0 for i in range(value.ndim))
        ]

    def expand(self, view: jax.Array) -> jax.Array:
        """Turns the value of the view into that of the operand."""
        if self.broadcast is None:
            return view
        return jax.lax.broadcast_in_dim(view, *self.broadcast)


def tap_dense(
    eqn: Any,
    operands: Sequence[Operand],
    values: Sequence[Any],
    dummies: Sequence[jax.Array],
) -> list[jax.Array]:
    """Evaluates an equation; gradients of its views become the cotangents of dummies.

    Args:
      eqn: an equation without a body.
      operands: which of the operands are views.
      values: the values of the operands.
      dummies: arrays with the shapes of the views, float32 or wider. They are not read.

    Returns:
      The outputs.
    """

    def substituted(values: Sequence[Any], views: Sequence[Any]) -> list[Any]:
        values = list(values)
        for operand, view in zip(operands, views, strict=True):
            values[operand.position] = operand.expand(view)
        return values

    @jax.custom_vjp
    def met(values: list[Any], dummies: list[jax.Array]) -> list[Any]:
        del dummies
        return _interpreter.bind(eqn, values)

    def forward(values: list[Any], dummies: list[jax.Array]) -> Any:
        return met(values, dummies), values

    def backward(values: list[Any], cotangents: list[Any]) -> Any:
        _, vjp_values = jax.vjp(lambda *xs: _interpreter.bind(eqn, xs), *values)
        views = [
            operand.shrink(values[operand.position]).astype(dummy.dtype)
            for operand, dummy in zip(operands, dummies, strict=True)
        ]
        # Differentiate with respect to all operands: some rules of jax allow nothing
        # else.
        wide, vjp_views = jax.vjp(
            lambda views, values: _views.bind_widened(eqn, substituted(values, views)),
            views,
            values,
        )
        of_wide = [
            ct.astype(x.dtype) if _views.is_float(x.dtype) else ct
            for ct, x in zip(cotangents, wide, strict=True)
        ]
        return list(vjp_values(cotangents)), vjp_views(of_wide)[0]

    met.defvjp(forward, backward)
    return met(list(values), list(dummies))
