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
    """An array that a program multiplies with, and the roles of its axes.

    Attributes:
      path: the name of the array.
      scale: the scale of the product of the factors.
      roles: "stack", "input" or "output" for each axis whose role is known.
      is_used: whether the program multiplies with the array.
    """

    path: str
    scale: float = 1.0
    roles: dict[int, str] = dataclasses.field(default_factory=dict)
    is_used: bool = False


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["array", "factors"],
    meta_fields=["origins", "target"],
)
@dataclasses.dataclass(frozen=True)
class View:
    """A view of a frozen array and of its factors.

    Attributes:
      array: the view of the array.
      factors: the views of A and B. It is empty if only the roles are recorded.
      origins: for each axis, the axes of the target that it is made of.
      target: the array that this is a view of.
    """

    array: Any
    factors: tuple[Any, ...]
    origins: tuple[tuple[int, ...], ...]
    target: Target

    def note(self, axes: Iterable[int], role: str) -> None:
        """Records the role of axes in the target; the first role of an axis counts.

        The role is "stack", "input" or "output".
        """
        for axis in axes:
            for origin in self.origins[axis]:
                self.target.roles.setdefault(origin, role)

    def with_array(self, array: Any) -> "View":
        """The same view of another array of the same shape."""
        return dataclasses.replace(self, array=array)

    def scaled(self, array: Any, by: Any) -> "View":
        """The view after a multiplication with one number; `array` is the result."""
        a_scaled = [x * jnp.reshape(by, ()).astype(x.dtype) for x in self.factors[:1]]
        factors = (*a_scaled, *self.factors[1:])
        return dataclasses.replace(self, array=array, factors=factors)

    def cut(self, array: Any, cuts: dict[int, Callable[..., Any]]) -> "View":
        """The view after cuts of axes; `array` is the result.

        `cuts` has a function for each axis. It takes an array and the keyword `axis`.
        """

        def cut_factor(factor: Any) -> Any:
            for axis, cut in cuts.items():
                if factor.shape[axis] == self.array.shape[axis]:
                    factor = cut(factor, axis=axis)
            return factor

        factors = tuple(map(cut_factor, self.factors))
        return dataclasses.replace(self, array=array, factors=factors)

    def transposed(self, permutation: Sequence[int]) -> "View":
        """The view with its axes in another order."""
        return View(
            jnp.transpose(self.array, permutation),
            tuple(jnp.transpose(x, (*permutation, -1)) for x in self.factors),
            tuple(self.origins[i] for i in permutation),
            self.target,
        )

    def squeezed(self, axes: Sequence[int]) -> "View":
        """The view without some axes of size one."""
        self.note(axes, "stack")
        return View(
            jnp.squeeze(self.array, axes),
            tuple(jnp.squeeze(x, axes) for x in self.factors),
            tuple(x for i, x in enumerate(self.origins) if i not in axes),
            self.target,
        )

    def reshaped(self, shape: Sequence[int]) -> "View":
        """The view in another shape.

        Raises:
          CannotFollowError: if that merges axes of different factors.
        """
        groups = _groups(self.array.shape, shape)
        origins = [
            tuple(sorted({i for axis in old for i in self._origins_of(axis)}))
            for old, new in groups
            for _ in new
        ]

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
                sizes += [shape[axis] if own == whole else 1 for axis in new]
            return jnp.reshape(factor, (*sizes, factor.shape[-1]))

        factors = tuple(map(reshape, self.factors))
        array = jnp.reshape(self.array, shape)
        return View(array, factors, tuple(origins), self.target)

    def _origins_of(self, axis: int) -> tuple[int, ...]:
        """The origins of an axis; none for size one, which a reshape may drop."""
        return self.origins[axis] if self.array.shape[axis] > 1 else ()

    def check_leading(self) -> None:
        """Raises CannotFollowError unless a loop can go over the first axis."""
        self.note([0], "stack")
        if any(x.shape[0] != self.array.shape[0] for x in self.factors):
            raise CannotFollowError("loops over an axis that is summed over")

    def without_leading(self) -> "View":
        """Drops the origin of the first axis, which a loop has removed."""
        return dataclasses.replace(self, origins=self.origins[1:])

    def product(self, eqn: Any, x: Any, y: Any, is_left: bool) -> Any:
        """Adds scale (x A) B to y = x W, the result of a `dot_general`.

        Args:
          eqn: the equation.
          x: the operand that is not the view.
          y: the result of the equation.
          is_left: whether the view is the first operand.

        Raises:
          CannotFollowError: if the contracted axes are not those of one factor.
        """
        summed, stacked = dimensions(eqn, is_left)
        rank = self.array.ndim  # the name of the rank axis; others have their numbers
        free = [i for i in range(rank) if i not in {*summed, *stacked}]
        self.note(summed, "input")
        self.note(stacked, "stack")
        self.note(free, "output")
        self.target.is_used = True
        if not self.factors:
            return y
        first, second = self._in_order(summed, stacked, free)
        names = dict(
            zip(sum(dimensions(eqn, not is_left), ()), summed + stacked, strict=True)
        )
        x_names = [names.get(i, rank + 1 + i) for i in range(x.ndim)]
        x_free = [name for name in x_names if name > rank]
        y_names = [*stacked, *(free + x_free if is_left else x_free + free)]
        first, second = first.astype(x.dtype), second.astype(x.dtype)
        between = [*stacked, *x_free, rank]
        first_names, second_names = [*summed, *stacked, rank], [*stacked, *free, rank]
        product = jnp.einsum(
            x, x_names, _only(first, first_names), sorted(first_names), between
        )
        if self.target.scale != 1:
            product *= jnp.asarray(self.target.scale, product.dtype)
        return y + jnp.einsum(
            product,
            between,
            _only(second, second_names),
            sorted(second_names),
            y_names,
            preferred_element_type=y.dtype,
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
    """Gives a factor the axes that it has in a view of `ndim` axes.

    `axes` has the axis of the array for each axis of the factor, and `ndim` for the
    rank.
    """
    ordered = jnp.transpose(factor, np.argsort(axes).tolist())
    return jnp.expand_dims(ordered, [i for i in range(ndim) if i not in axes])


def dimensions(eqn: Any, is_left: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The contracted axes and the batch axes of one operand."""
    summed, stacked = eqn.params["dimension_numbers"]
    side = 0 if is_left else 1
    return tuple(summed[side]), tuple(stacked[side])


def _only(factor: Any, axes: Sequence[int]) -> Any:
    """A factor without the axes that are not in `axes`; these have size one."""
    return jnp.squeeze(factor, [i for i in range(factor.ndim) if i not in axes])


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[range, range]]:
    """The smallest groups of consecutive axes that a reshape maps to each other.

    >>> _groups((6, 4, 5), (2, 3, 20))
    [(range(0, 1), range(0, 2)), (range(1, 3), range(2, 3))]
    """
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        ends = [min(i + 1, len(old)), min(j + 1, len(new))]
        while (sizes := _sizes(old[i : ends[0]], new[j : ends[1]]))[0] != sizes[1]:
            ends[sizes[0] > sizes[1]] += 1
        groups.append((range(i, ends[0]), range(j, ends[1])))
        i, j = ends
    return groups


def _sizes(old: Sequence[int], new: Sequence[int]) -> tuple[int, int]:
    return math.prod(old), math.prod(new)
