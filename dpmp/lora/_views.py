"""A frozen array, and the two low-rank factors of the change that is added to it.

A program looks at an array in many ways before it multiplies with it: a loop takes a
slice of each layer, a reshape merges the heads of an attention, a transposition turns
the array around. A `View` follows the array W and its factors A and B through these
operations, so that the product with `x` can be computed as x W + scale (x A) B.

Every axis of a view has a label, and an axis of a factor has the label of the axis of
W to which it belongs. The labels say what an operation on an axis of W does to the
factors: an axis of the inputs is one of A, an axis of the outputs is one of B, and an
axis over which arrays are stacked, as those of the layers of a model, is one of both.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Label(NamedTuple):
    """Names an axis of a view.

    Attributes:
      axes: the axes of the original array that the axis is made of, or a part of.
      part: tells different parts of the same axes from each other.
    """

    axes: tuple[int, ...]
    part: int = 0


RANK = Label((-1,))
"""The axis that both factors have, and the array has not."""

_parts = itertools.count(1)


class CannotFollowError(Exception):
    """Raised where an operation on a view has no counterpart for its factors."""


@dataclasses.dataclass(eq=False)
class Target:
    """An array that a program multiplies with, and a record of how it does that.

    Attributes:
      path: the name of the array.
      scale: the number that the product of the factors is multiplied with.
      roles: "stack", "input" or "output" for each axis whose role is known.
      is_used: whether the program multiplies with the array.
    """

    path: str
    scale: float = 1.0
    roles: dict[int, str] = dataclasses.field(default_factory=dict)
    is_used: bool = False

    def note(self, labels: Sequence[Label], role: str) -> None:
        """Notes the role of the axes that labels stand for; the first one counts."""
        for label in labels:
            for axis in label.axes:
                self.roles.setdefault(axis, role)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["array", "factors"],
    meta_fields=["labels", "labels_of_factors", "target"],
)
@dataclasses.dataclass(frozen=True)
class View:
    """A view of a frozen array and of its factors.

    Attributes:
      array: the view of the array.
      labels: the label of each of its axes.
      factors: the views of A and B. It is empty where a program is only watched.
      labels_of_factors: the labels of the axes of each factor.
      target: the array that this is a view of.
    """

    array: Any
    labels: tuple[Label, ...]
    factors: tuple[Any, ...]
    labels_of_factors: tuple[tuple[Label, ...], ...]
    target: Target

    def with_array(self, array: Any) -> "View":
        """The same view of another array of the same shape."""
        return dataclasses.replace(self, array=array)

    def scaled(self, array: Any, by: Any) -> "View":
        """The view after a multiplication with one number, which gives `array`."""
        factors = list(self.factors)
        if factors:
            factors[0] = factors[0] * jnp.reshape(by, ()).astype(factors[0].dtype)
        return dataclasses.replace(self, array=array, factors=tuple(factors))

    def transposed(self, permutation: Sequence[int]) -> "View":
        """The view with its axes in another order. The factors stay as they are."""
        return dataclasses.replace(
            self,
            array=jnp.transpose(self.array, permutation),
            labels=tuple(self.labels[i] for i in permutation),
        )

    def on_axes(
        self, array: Any, changes: dict[int, Callable[[Any, int], Any]]
    ) -> "View":
        """The view after changes of single axes that keep their number.

        Args:
          array: the result of all changes of the array.
          changes: for each changed axis, a function of a factor and its axis.
        """
        factors = list(self.factors)
        for axis, change in changes.items():
            for i, labels in enumerate(self.labels_of_factors):
                if self.labels[axis] in labels:
                    factors[i] = change(factors[i], labels.index(self.labels[axis]))
        return dataclasses.replace(self, array=array, factors=tuple(factors))

    def without(self, axes: Sequence[int]) -> "View":
        """The view without some axes of size one."""
        dropped = {self.labels[axis] for axis in axes}
        factors, labels_of_factors = list(self.factors), list(self.labels_of_factors)
        for i, labels in enumerate(self.labels_of_factors):
            gone = [j for j, label in enumerate(labels) if label in dropped]
            factors[i] = jnp.squeeze(factors[i], gone)
            labels_of_factors[i] = tuple(x for x in labels if x not in dropped)
        return View(
            jnp.squeeze(self.array, axes),
            tuple(x for x in self.labels if x not in dropped),
            tuple(factors),
            tuple(labels_of_factors),
            self.target,
        )

    def reshaped(self, shape: Sequence[int]) -> "View":
        """The view in another shape.

        Raises:
          CannotFollowError: if that merges axes of different factors.
        """
        view = self.without([i for i, n in enumerate(self.array.shape) if n == 1])
        before, labels = view, []
        for old, new in _groups(before.array.shape, shape):
            group = tuple(before.labels[i] for i in old)
            if len(group) == len(new) == 1:
                labels.append(group[0])
                continue
            axes = tuple(sorted({axis for label in group for axis in label.axes}))
            made = tuple(Label(axes, next(_parts)) for _ in new)
            view = view._regrouped(group, made, [shape[i] for i in new])
            labels += made
        array = jnp.reshape(self.array, shape)
        return dataclasses.replace(view, array=array, labels=tuple(labels))

    def leading(self) -> "View":
        """The view with the first axis first in its factors too, as a loop needs it.

        Raises:
          CannotFollowError: if not both factors have this axis.
        """
        first = self.labels[0]
        self.target.note([first], "stack")
        if self.factors and not all(first in x for x in self.labels_of_factors):
            raise CannotFollowError("loops over an axis that is summed over")
        ordered = [
            _ordered(factor, labels, (first, *(x for x in labels if x != first)))
            for factor, labels in zip(self.factors, self.labels_of_factors, strict=True)
        ]
        return dataclasses.replace(
            self,
            factors=tuple(factor for factor, _ in ordered),
            labels_of_factors=tuple(labels for _, labels in ordered),
        )

    def without_leading(self) -> "View":
        """Drops the first label everywhere; a loop has taken its axis away."""
        return dataclasses.replace(
            self,
            labels=self.labels[1:],
            labels_of_factors=tuple(x[1:] for x in self.labels_of_factors),
        )

    def _regrouped(
        self, group: tuple[Label, ...], made: tuple[Label, ...], sizes: Sequence[int]
    ) -> "View":
        """Gives the axes of a group other sizes and labels, in the factors."""
        factors, labels_of_factors = list(self.factors), list(self.labels_of_factors)
        for i, labels in enumerate(self.labels_of_factors):
            here = [label for label in group if label in labels]
            if not here:
                continue
            if len(here) < len(group):
                raise CannotFollowError("merges an axis of inputs with one of outputs")
            at = labels.index(group[0])
            rest = [label for label in labels if label not in group]
            factor, _ = _ordered(factors[i], labels, (*rest[:at], *group, *rest[at:]))
            shape = factor.shape
            shape = (*shape[:at], *sizes, *shape[at + len(group) :])
            factors[i] = jnp.reshape(factor, shape)
            labels_of_factors[i] = (*rest[:at], *made, *rest[at:])
        return dataclasses.replace(
            self, factors=tuple(factors), labels_of_factors=tuple(labels_of_factors)
        )


def _ordered(
    factor: Any, labels: tuple[Label, ...], wanted: tuple[Label, ...]
) -> tuple[Any, tuple[Label, ...]]:
    """A factor with its axes in the wanted order, and their labels."""
    if labels == wanted:
        return factor, labels
    return jnp.transpose(factor, [labels.index(x) for x in wanted]), wanted


def _groups(
    old: Sequence[int], new: Sequence[int]
) -> list[tuple[list[int], list[int]]]:
    """The smallest groups of consecutive axes that a reshape maps to each other.

    >>> _groups((6, 4, 5), (2, 3, 20))
    [([0], [0, 1]), ([1, 2], [2])]
    """
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        ends = [min(i + 1, len(old)), min(j + 1, len(new))]
        while (sizes := _sizes(old[i : ends[0]], new[j : ends[1]]))[0] != sizes[1]:
            ends[sizes[0] > sizes[1]] += 1
        groups.append((list(range(i, ends[0])), list(range(j, ends[1]))))
        i, j = ends
    return groups


def _sizes(old: Sequence[int], new: Sequence[int]) -> tuple[int, int]:
    return math.prod(old), math.prod(new)
