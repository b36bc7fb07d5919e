"""The product of a matrix x with a frozen matrix W and its factors A and B.

    y = x W + scale (x A) B

The sum W + scale A B is never formed: its gradient would be as large as W.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpmp.lora._views import RANK, CannotFollowError, Label, View
from dpmp.programs._interpreter import bind


def product(eqn: Any, values: list[Any], view: View, is_left: bool) -> Any:
    """Evaluates a `dot_general` of which one operand is a view.

    Raises:
      CannotFollowError: if the axes that are summed over are not those of one factor.
    """
    x = values[1] if is_left else values[0]
    arrays = [view.array, x] if is_left else [x, view.array]
    (y,) = bind(eqn, arrays)
    contracted, batch = _axes_of(eqn, is_left)
    summed = [view.labels[i] for i in contracted]
    stacked = [view.labels[i] for i in batch]
    _note(view, summed, stacked)
    if not view.factors:
        return y
    first, second = _in_order(view, summed, stacked)
    left = (x, *_axes_of(eqn, not is_left))
    x_factor = _times(left, first, summed, stacked, flipped=False, dtype=None)
    if view.target.scale != 1:
        x_factor *= jnp.asarray(view.target.scale, x_factor.dtype)
    last = (x_factor, (x_factor.ndim - 1,), range(len(batch)))
    change = _times(last, second, [RANK], stacked, flipped=is_left, dtype=y.dtype)
    change = _like(change, view, second[1], summed, stacked, is_left)
    return y + jnp.reshape(change, y.shape)


def _note(view: View, summed: list[Label], stacked: list[Label]) -> None:
    view.target.note(summed, "input")
    view.target.note(stacked, "stack")
    view.target.note(view.labels, "output")
    view.target.is_used = True


def _axes_of(eqn: Any, is_left: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of one operand that are summed over, and those of its batch."""
    contracted, batch = eqn.params["dimension_numbers"]
    side = 0 if is_left else 1
    return tuple(contracted[side]), tuple(batch[side])


def _in_order(
    view: View, summed: list[Label], stacked: list[Label]
) -> list[tuple[Any, tuple[Label, ...]]]:
    """The factor that x is multiplied with, then the other one, with their labels."""
    pairs = list(zip(view.factors, view.labels_of_factors, strict=True))
    for first, second in (pairs, pairs[::-1]):
        rest = {*second[1]} - {RANK, *stacked}
        free = {*view.labels} - {*summed, *stacked}
        fits = {*first[1]} == {RANK, *summed, *stacked}
        if fits and rest <= free and {*stacked} <= {*second[1]}:
            return [first, second]
    raise CannotFollowError("sums over other axes than those of its inputs")


def _times(
    left: tuple[Any, Sequence[int], Sequence[int]],
    right: tuple[Any, tuple[Label, ...]],
    summed: list[Label],
    stacked: list[Label],
    *,
    flipped: bool,
    dtype: Any,
) -> Any:
    """Multiplies an array, with its summed and batch axes, and a factor.

    The axes of the factor come last in the result, or right after those of the batch if
    `flipped`. The factor is cast to the dtype of the array.
    """
    x, contracted, batch = left
    factor, labels = right
    factor = factor.astype(x.dtype)
    of_x = tuple(contracted), tuple(batch)
    of_factor = tuple(map(labels.index, summed)), tuple(map(labels.index, stacked))
    pairs = (
        [(factor, of_factor), (x, of_x)]
        if flipped
        else [(x, of_x), (factor, of_factor)]
    )
    (a, (summed_a, batch_a)), (b, (summed_b, batch_b)) = pairs
    numbers = (summed_a, summed_b), (batch_a, batch_b)
    return jax.lax.dot_general(a, b, numbers, preferred_element_type=dtype)


def _like(
    change: Any,
    view: View,
    labels: tuple[Label, ...],
    summed: list[Label],
    stacked: list[Label],
    is_left: bool,
) -> Any:
    """The change with the axes of the outputs in the order of the view.

    Axes of size one, which are in no factor, are missing.
    """
    have = [x for x in labels if x != RANK and x not in stacked]
    wanted = [x for x in view.labels if x in have]
    if have == wanted:
        return change
    start = len(stacked) if is_left else change.ndim - len(have)
    order = list(range(change.ndim))
    order[start : start + len(have)] = [start + have.index(x) for x in wanted]
    return jnp.transpose(change, order)
