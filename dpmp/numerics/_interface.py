"""The interface of arithmetics: ways to add up clipped gradients."""

import abc
import operator
from collections.abc import Sequence
from typing import Any, Self

import jax

from dpmp._fence import StoredArray
from dpmp._typing import PyTree
from dpmp.numerics import reduction


class Arithmetic(abc.ABC):
    """A way to add up clipped gradients; frozen and hashable.

    A contribution is the clipped gradient of one example as it enters the sum. A
    clipping group is the parameters that share one clip norm. Some arithmetics use a
    grid: they count in integer multiples of one number, the unit, and need a finite
    clip norm.
    """

    name: Any  # as users spell it
    method: Any  # the name of the gradient engine that it is for
    resolution: Any = None  # the units in the largest contribution; None without a grid
    largest_resolution: Any = None  # that may be chosen
    bytes_per_entry: Any  # of the sum
    rounding_reserve: Any  # the share of the clip norm for the rounding of float sums
    is_proved: Any = True  # whether the sensitivity is proved for the computed bits
    # Whether an engine must compute upper bounds that include rounding errors. These
    # need small microbatches, and fixed slots of examples.
    needs_norm_bounds: Any = False
    assumption: Any  # a sentence for the statement, on what is assumed of the device

    def check_mode(self) -> None:
        """Raises ValueError if jax would silently narrow the sum."""

    def check_not_mapped(self) -> None:
        """Raises ValueError under `jax.shard_map`, unless `psum` may add its sums."""

    @abc.abstractmethod
    def check_batch(
        self, batch_size: int, microbatch_size: int, num_shards: int = 1
    ) -> None:
        """Raises ValueError for a batch whose rounding is not covered.

        Both sizes are those of all shards together (`clipping/_shards.py`).
        """

    def with_resolution(self, resolution: int | None) -> Self:
        """Returns this arithmetic on a grid of another resolution, if it has a grid."""
        del resolution
        return self

    def for_clip_norms(self, bounds: Sequence[float], l2_norm_bound: float) -> Self:
        """Returns this arithmetic for the largest norms of each group, and of all."""
        del bounds, l2_norm_bound
        return self

    @abc.abstractmethod
    def targets(
        self, targets: list[tuple[float, Any]], num_entries: list[int]
    ) -> list[tuple[float, Any]]:
        """Lowers the norms to clip to, by a reserve for rounding.

        The targets are a norm and a largest coefficient for each group. On a grid, the
        results are in units.
        """

    @abc.abstractmethod
    def add_over(self, total: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """Adds the sums of the devices along mesh axes, inside of `shard_map`."""

    @abc.abstractmethod
    def add_and_cut(
        self, total: jax.Array, axes: tuple[str, ...], axis: int
    ) -> jax.Array:
        """Like `add_over`, but a device receives only its own part along `axis`."""

    def finish(self, total: PyTree) -> PyTree:
        """Turns a tree of sums into the form that users receive."""
        return total

    def wanted_resolution(self, num_parameters: int) -> float | None:
        """Returns the resolution that a sum needs, or None without a grid."""
        del num_parameters

    def rounding_share(self, num_parameters: int, resolution: int) -> float:
        """Returns the share of the clip norm that rounding to a grid takes."""
        del num_parameters, resolution
        return 0.0

    @abc.abstractmethod
    def describe(self, resolution: int | None, microbatch_size: int | None) -> str:
        """Describes for the statement, in full sentences, how sums are computed."""


class GradientSums(Arithmetic):
    """An arithmetic of "per_example", the engine that materializes gradients."""

    def passes_norm_check(
        self, stack: list[StoredArray], coef: jax.Array, keep: jax.Array, group: int
    ) -> jax.Array:
        """Returns which examples of `keep` contribute to a clipping group, (B,) bool.

        The arrays of the group are (B, n), and the coefficients (B,).
        """
        del stack, coef, group
        return keep

    @abc.abstractmethod
    def contribution(
        self, row: jax.Array, coef: jax.Array, zero: jax.Array
    ) -> jax.Array:
        """Returns the contribution of an example with gradient `row`, (n,).

        The compiler does not know that `zero`, an int32, is zero.
        """

    def add_block(self, terms: list[jax.Array]) -> jax.Array:
        """Adds up a few contributions."""
        return reduction.pairwise(terms, operator.add)


class PartialSums(Arithmetic):
    """An arithmetic of "book_keeping", which sums each microbatch in floats."""

    @abc.abstractmethod
    def from_float(self, total: jax.Array) -> jax.Array:
        """Turns the float sum of a microbatch into a sum of this arithmetic."""
