"""A frozen array, and the two low-rank factors of the change that is added to it.

A program often transforms an array before it multiplies with it: a loop takes a slice
for each layer, a reshape merges the heads of an attention, or the array is transposed.
A `View` follows the array W and its factors A and B through these operations, so that
the product with `x` can be computed as x W + scale (x A) B.

In a view, both factors have the axes of the array, and the rank as their last axis. An
axis that a factor does not depend on has size one. The change is the sum over the rank
of A * B. So an operation that moves or cuts an axis of the array is applied to each
factor with this axis too.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class CannotFollowError(Exception):
    """Raised where an operation on a view has no counterpart for its factors."""


@dataclasses.dataclass(eq=False)
class Target:
    """The name of an array, and what a program does with it."""

    path: str
    scale: float = 1.0
    # "stack", "input" or "output" for each axis whose role is known.
    roles: dict[int, str] = dataclasses.field(default_factory=dict)
    is_used: bool = False  # whether the program multiplies with the array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["array", "factors"],
    meta_fields=["origins", "target"],
)
@dataclasses.dataclass(frozen=True)
class View:
    """A view of a target and of its factors."""

    array: Any
    factors: tuple[Any, ...]  # A and B, or none if only the roles are recorded
    origins: tuple[tuple[int, ...], ...]  # for each axis, axes of the target
    target: Target

    def note(self, axes: Iterable[int], role: str) -> None:
        """Records the role of axes in the target; the first role of an axis counts."""
        for axis in axes:
            for origin in self.origins[axis]:
                self.target.roles.setdefault(origin, role)

    def transposed(self, array: Any, permutation: Sequence[int]) -> "View":
        """The view `array`, which has the axes in another order."""
        factors = tuple(jnp.transpose(x, (*permutation, -1)) for x in self.factors)
        origins = tuple(self.origins[i] for i in permutation)
        return View(array, factors, origins, self.target)

    def reshaped(self, array: Any) -> "View":
        """The view `array`, whose shape must not merge axes of different factors."""
        groups = _groups(self.array.shape, array.shape)

        def reshape(factor: Any) -> Any:
            sizes = []
            for old, new in groups:
                whole, own = (
                    math.prod(x.shape[axis] for axis in old)
                    for x in (self.array, factor)
                )
                if own not in (1, whole):
                    raise CannotFollowError(
                        "merges an axis of inputs with one of outputs"
                    )
                sizes += [array.shape[axis] if own == whole else 1 for axis in new]
            return jnp.reshape(factor, (*sizes, factor.shape[-1]))

        origins = []
        for old, new in groups:
            # A reshape may drop an axis of size one, with its origins.
            wide = [axis for axis in old if self.array.shape[axis] > 1]
            merged = {origin for axis in wide for origin in self.origins[axis]}
            origins += [tuple(merged) for _ in new]
        factors = tuple(map(reshape, self.factors))
        return View(array, factors, tuple(origins), self.target)

    def cut(self, array: Any, cut_axis: Callable[[Any, int], Any]) -> "View":
        """The view `array` of a part; `cut_axis(factor, axis)` cuts a factor alike."""

        def cut(factor: Any) -> Any:
            for axis, whole in enumerate(self.array.shape):
                if array.shape[axis] < whole == factor.shape[axis]:
                    factor = cut_axis(factor, axis)
            return factor

        factors = tuple(map(cut, self.factors))
        return dataclasses.replace(self, array=array, factors=factors)

    def check_leading(self) -> None:
        """Raises CannotFollowError unless a loop can go over the first axis."""
        self.note([0], "stack")
        if any(x.shape[0] != self.array.shape[0] for x in self.factors):
            raise CannotFollowError("loops over an axis that is summed over")

    def product(self, eqn: Any, x: Any, y: Any, is_left: bool) -> Any:
        """Adds scale (x A) B to y = x W; the view is the left or right operand."""
        summed, stacked = _dimensions(eqn, is_left)
        rank = self.array.ndim  # the name of the rank axis; others have their numbers
        free = [i for i in range(rank) if i not in {*summed, *stacked}]
        self.note(summed, "input")
        self.note(stacked, "stack")
        self.note(free, "output")
        self.target.is_used = True
        if not self.factors:
            return y
        first, second = (
            factor.astype(x.dtype) for factor in self._in_order(summed, stacked, free)
        )
        names = dict(
            zip(sum(_dimensions(eqn, not is_left), ()), summed + stacked, strict=True)
        )
        x_names = [names.get(i, rank + 1 + i) for i in range(x.ndim)]
        x_free = [name for name in x_names if name > rank]
        y_names = [*stacked, *(free + x_free if is_left else x_free + free)]
        between = [*stacked, *x_free, rank]
        first_named = _named(first, [*summed, *stacked, rank])
        product = jnp.einsum(x, x_names, *first_named, between)
        if self.target.scale != 1:
            product *= jnp.asarray(self.target.scale, product.dtype)
        second_named = _named(second, [*stacked, *free, rank])
        return y + jnp.einsum(
            product, between, *second_named, y_names, preferred_element_type=y.dtype
        )

    def _in_order(
        self, summed: Sequence[int], stacked: Sequence[int], free: Sequence[int]
    ) -> tuple[Any, Any]:
        """The factor that x is multiplied with, then the other one."""
        shape = self.array.shape
        for first, second in (self.factors, self.factors[::-1]):
            is_stacked = all(
                x.shape[i] == shape[i] for x in (first, second) for i in stacked
            )
            is_first = all(first.shape[i] == 1 for i in free)
            if is_stacked and is_first and all(second.shape[i] == 1 for i in summed):
                return first, second
        raise CannotFollowError("sums over other axes than those of its inputs")


def aligned(factor: Any, axes: Sequence[int], ndim: int) -> Any:
    """Gives a factor the axes of a view; `axes` is a result of `factor_axes`."""
    ordered = jnp.transpose(factor, np.argsort(axes).tolist())
    return jnp.expand_dims(ordered, [i for i in range(ndim) if i not in axes])


def _dimensions(eqn: Any, is_left: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The contracted axes and the batch axes of one operand."""
    summed, stacked = eqn.params["dimension_numbers"]
    side = 0 if is_left else 1
    return tuple(summed[side]), tuple(stacked[side])


def _named(factor: Any, axes: Sequence[int]) -> tuple[Any, list[int]]:
    """A factor without the axes of size one that are not in `axes`, and its names."""
    others = [i for i in range(factor.ndim) if i not in axes]
    return jnp.squeeze(factor, others), sorted(axes)


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[range, range]]:
    """The smallest groups of consecutive axes that a reshape maps to each other."""
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        i_end, j_end = min(i + 1, len(old)), min(j + 1, len(new))
        while (size := math.prod(old[i:i_end])) != math.prod(new[j:j_end]):
            if size < math.prod(new[j:j_end]):
                i_end += 1
            else:
                j_end += 1
        groups.append((range(i, i_end), range(j, j_end)))
        i, j = i_end, j_end
    return groups
