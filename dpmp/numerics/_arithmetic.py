"""The arithmetic of a sum of clipped gradients: parsed once, by name, into an object.

    arithmetic = parse("exact", method="per_example")

How a sum is formed, and why its sensitivity holds, is nobody else's business: no other
module compares these names, or asks what kind of object it has been given.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

from dpmp import _validate
from dpmp._numbers import as_number
from dpmp._typing import PyTree
from dpmp.numerics._bounded import BoundedSums
from dpmp.numerics._exact import ExactSums
from dpmp.numerics._float_sums import FLOAT_SUMS, UNPROVED
from dpmp.numerics._stored import StoredArray

_ON_GRIDS = {"exact": ExactSums, "bounded": BoundedSums}


class Arithmetic(Protocol):
    """How clipped gradients are added up; frozen and hashable."""

    @property
    def name(self) -> str:
        """As users spell it."""
        ...

    @property
    def resolution(self) -> int | None:
        """How many units the largest contribution has; None where there is no grid."""
        ...

    @property
    def bytes_per_entry(self) -> int:
        """What the sum takes."""
        ...

    @property
    def is_proved(self) -> bool:
        """Whether the sensitivity holds for the bits that are computed."""
        ...

    @property
    def needs_clipping(self) -> bool:
        """Whether there is no such sum for an infinite clip norm."""
        ...

    @property
    def clips_by_bounds(self) -> bool:
        """Whether an engine has to bound what it computes.

        Such bounds need small microbatches, and hold if examples keep their places.
        """
        ...

    @property
    def assumption(self) -> str:
        """A sentence for the statement on what is assumed; empty for nothing."""
        ...

    def check_method(self, method: str) -> None:
        """Raises ValueError for a gradient engine that it does not go with."""
        ...

    def check_mode(self) -> None:
        """Raises ValueError where jax would silently narrow the sum."""
        ...

    def check_not_mapped(self) -> None:
        """Raises ValueError where sums of other devices must not be added to it."""
        ...

    def check_batch(self, batch_size: int, microbatch_size: int) -> None:
        """Raises ValueError for a batch whose sum is not covered."""
        ...

    def for_clip_norms(
        self, bounds: Sequence[float], l2_norm_bound: float
    ) -> "Arithmetic":
        """The arithmetic of a sum.

        Args:
          bounds: the largest norm of each clipping group.
          l2_norm_bound: the largest norm of all of them together.
        """
        ...

    def targets(
        self, targets: list[tuple[float, Any]], num_entries: list[int]
    ) -> list[tuple[float, Any]]:
        """What to clip to, with room for rounding.

        Args:
          targets: for each group the largest norm, and the largest coefficient.
          num_entries: of each group.

        Returns:
          The same, for contributions to the sum.
        """
        ...

    def add(self, a: PyTree, b: PyTree, /) -> PyTree:
        """The sum of two sums."""
        ...

    def finish(self, total: PyTree) -> PyTree:
        """A tree of sums as users get it."""
        ...

    def wanted_resolution(self, num_parameters: int) -> float | None:
        """How fine a grid should be; None where there is none."""
        ...

    def share_lost(self, num_parameters: int, resolution: int) -> float:
        """The share of the clip norm that rounding to a grid takes."""
        ...

    def describe(self, resolution: int | None, microbatch_size: int | None) -> str:
        """Sentences for the statement on how sums are formed."""
        ...


class GradientSums(Arithmetic, Protocol):
    """An arithmetic for engines that form gradients."""

    def admit(
        self, stack: list[StoredArray], coef: jax.Array, keep: jax.Array, group: int
    ) -> jax.Array:
        """Which examples contribute, (B,) bool, where gradients are formed.

        Args:
          stack: the arrays of a clipping group, (B, n).
          coef: (B,) coefficients.
          keep: (B,) bool.
          group: the number of the group.
        """
        ...

    def contribution(
        self, row: jax.Array, coef: jax.Array, zero: jax.Array
    ) -> jax.Array:
        """What an example adds to the sum, (n,), from its gradient and coefficient.

        Args:
          row: (n,), float32 or wider.
          coef: a number.
          zero: an int32 that the compiler does not know to be zero.
        """
        ...

    def add_block(self, terms: list[jax.Array], /) -> PyTree:
        """The sum of a few contributions."""
        ...


class PartialSums(Arithmetic, Protocol):
    """An arithmetic for engines that form the sums of microbatches, in floats."""

    def lift(self, total: jax.Array, /) -> PyTree:
        """The sum of a microbatch, where an engine has formed it in floats."""
        ...


def parse(
    name: str | None,
    *,
    method: str = "per_example",
    dtype: Any = None,
    resolution: int | None = None,
) -> Arithmetic:
    """The arithmetic of `clipped_grad`; see there for the arguments.

    Raises:
      ValueError: for an unknown name, for a dtype narrower than float32, for arguments
        that do not go together, and for float64 without 64-bit mode.
    """
    if name is None:
        name = _name_for_dtype(dtype, method)
    resolution = as_number(resolution)
    names = [*_ON_GRIDS, *sorted(FLOAT_SUMS)]
    _validate.require(
        name in names,
        f"arithmetic must be one of {names}",
        arithmetic=name,
        fix="Use one of these names.",
    )
    is_on_grid = name in _ON_GRIDS
    _validate.require(
        dtype is None if is_on_grid else resolution is None,
        'dtype goes with float sums, and resolution with "exact" and "bounded"',
        arithmetic=name,
        dtype=dtype,
        resolution=resolution,
        fix="Leave out the other one.",
    )
    if is_on_grid:
        given = {} if resolution is None else {"resolution": resolution}
        arithmetic: Arithmetic = _ON_GRIDS[name](**given)
    else:
        arithmetic = FLOAT_SUMS[name]
        _validate.require(
            dtype is None or np.dtype(dtype) == arithmetic.dtype,
            "dtype and arithmetic must name the same sums",
            dtype=None if dtype is None else np.dtype(dtype).name,
            arithmetic=name,
            fix="Leave out one of the two: rounding a wide sum to float32 before the "
            "noise is added would undo it.",
        )
    arithmetic.check_method(method)
    arithmetic.check_mode()
    return arithmetic


def _name_for_dtype(dtype: Any, method: str) -> str:
    if method == "book_keeping":
        _validate.require(
            dtype is None,
            "book-keeping has no proved sums of a float dtype",
            dtype=dtype,
            fix='Leave dtype out for "bounded" sums, or say '
            f'arithmetic="{UNPROVED}float32" or "{UNPROVED}float64", or use '
            'method="per_example".',
        )
        return "bounded"
    name = "float32" if dtype is None else np.dtype(dtype).name
    _validate.require(
        name in ("float32", "float64"),
        "dtype must be float32 or float64",
        dtype=name,
        fix="Leave dtype out: half-precision norms and sums break the clipping bound, "
        "and only the model's own arithmetic may be narrower.",
    )
    return name


def default_name(method: str) -> str:
    """The arithmetic of `DPSGD`, unless another one is asked for."""
    return "bounded" if method == "book_keeping" else "exact"


def name_without_privacy(method: str) -> str:
    """The arithmetic where nothing is clipped."""
    return f"{UNPROVED}float32" if method == "book_keeping" else "float32"
