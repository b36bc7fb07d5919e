"""Sums of clipped gradients in integers on a grid: exact, in any order.

A contribution is the clipped gradient of one example as it enters the sum. One unit of
the grid is the largest contribution divided by `resolution`. Each contribution is
rounded to integers q, and checked for each clipping group. The part of a group counts
only if

    sum of q^2 <= radius^2

holds in integer arithmetic, with the radius of the group. Otherwise zero is selected.
So the sensitivity does not depend on the earlier float operations, their order, or the
compiler. Integers are added modulo 2^32, which does not round and does not depend on
the order. The sensitivity is therefore `resolution` units for a batch of any size, and
for any division into microbatches.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.numerics import _reduction
from dpmp.numerics._grid import DEFAULT_RESOLUTION, Grid
from dpmp.numerics._stored import StoredArray

_FRACTION_BITS = 8
_WEYL_STEP = np.uint32(0x9E3779B1)  # 2^32 over the golden ratio


@dataclasses.dataclass(frozen=True)
class ExactSums:
    """The arithmetic of exact sums; an `Arithmetic`.

    Attributes:
      resolution: the size of the largest contribution, in units of the grid.
      grid: the grid of the sum, once the clip norms are known.
    """

    resolution: int = DEFAULT_RESOLUTION
    grid: Grid = Grid.UNKNOWN

    name: str = dataclasses.field(default="exact", init=False)
    bytes_per_entry: int = dataclasses.field(default=4, init=False)
    is_proved: bool = dataclasses.field(default=True, init=False)
    needs_clipping: bool = dataclasses.field(default=True, init=False)
    clips_by_bounds: bool = dataclasses.field(default=False, init=False)
    assumption: str = dataclasses.field(default="", init=False)

    def check_method(self, method: str) -> None:
        """See `Arithmetic`."""
        _validate.require(
            method != "book_keeping",
            "exact sums need gradients that are formed, rounded and checked",
            method=method,
            arithmetic=self.name,
            fix='Use arithmetic="bounded" instead, or method="per_example".',
        )

    def for_clip_norms(
        self, bounds: Sequence[float], l2_norm_bound: float
    ) -> "ExactSums":
        """See `Arithmetic`."""
        grid = Grid.from_bounds(bounds, l2_norm_bound, self.resolution)
        return dataclasses.replace(self, grid=grid)

    def check_batch(self, batch_size: int, microbatch_size: int) -> None:
        """Warns if sums can wrap around."""
        del microbatch_size
        self.grid.warn_of_overflow(batch_size)

    def targets(
        self, targets: list[tuple[float, Any]], num_entries: list[int]
    ) -> list[tuple[float, Any]]:
        """The norms to clip to, and the largest coefficients, in units.

        On average, rounding adds at most 1/4 to the square of an entry. The sum over
        all entries deviates from that average by about the radius.
        """
        scaled = []
        for (bound, cap), radius, size in zip(
            targets, self.grid.radii, num_entries, strict=True
        ):
            room = size / 4 + 6 * radius
            largest = math.sqrt(max(radius**2 - room, 0))
            self.grid.check_loss(largest, radius, size, bound)
            scaled.append((largest, self.grid.in_units(cap)))
        return scaled

    def check_mode(self) -> None:
        """Does nothing: exact sums need no 64-bit mode."""

    def check_not_mapped(self) -> None:
        """Does nothing: integers may be added over devices."""

    def admit(
        self, stack: list[StoredArray], coef: jax.Array, keep: jax.Array, group: int
    ) -> jax.Array:
        """Returns which examples contribute, by `keep` and by the radius.

        Args:
          stack: the arrays of a clipping group, (B, n).
          coef: (B,) coefficients, from gradients to units.
          keep: (B,) bool. An example whose entry is False does not contribute.
          group: the number of the group.
        """
        return keep & _is_within(stack, coef, self.grid.radii[group])

    def contribution(
        self, row: jax.Array, coef: jax.Array, zero: jax.Array
    ) -> jax.Array:
        """Returns the contribution of an example, in integers: (n,).

        Args:
          row: the entries of its gradient.
          coef: its coefficient.
          zero: an int32 zero that the compiler does not know. With a known zero, it
            would store the rounding thresholds of all positions.
        """
        return _round(row[None], coef[None], zero)[0]

    def add_block(self, terms: list[jax.Array]) -> jax.Array:
        """Adds up a few contributions."""
        return _reduction.pairwise(terms, self.add)

    def add(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Adds the sums of two parts of a batch."""
        return a + b

    def finish(self, total: PyTree) -> PyTree:
        """Adds the unit to a tree of integer sums."""
        return self.grid.finish(total)

    def wanted_resolution(self, num_parameters: int) -> float:
        """See `Arithmetic`."""
        return math.sqrt(100 * num_parameters)

    def share_lost(self, num_parameters: int, resolution: int) -> float:
        """See `Arithmetic`; this is the share that `targets` takes."""
        return num_parameters / (8 * resolution**2) + 3 / resolution

    def describe(self, resolution: int | None, microbatch_size: int | None) -> str:
        """See `Arithmetic`."""
        del microbatch_size
        return (
            f"clipped gradients are rounded to a grid on which the largest "
            f"contribution has {resolution} units; their norms are checked, and they "
            f"are summed, in integers, without rounding."
        )


def _is_within(stack: list[StoredArray], coef: jax.Array, radius: int) -> jax.Array:
    """Whether the sum of squares is at most the squared radius, exactly: (B,) bool.

    Squares and sums are cut off at a power of two above the squared radius, so that
    they never exceed their dtype.
    """
    fits_32_bits = radius < 2**15
    with jax.enable_x64(not fits_32_bits or jax.config.read("jax_enable_x64")):
        squares = _SQUARES_IN_32_BITS if fits_32_bits else _SQUARES_IN_64_BITS
        total, _ = _reduction.sum_entries(stack, squares, squares.add, coef)
        return total <= jnp.asarray(radius**2, squares.dtype)


@dataclasses.dataclass(frozen=True)
class _Squares:
    """Squares of the integers that gradients are rounded to, cut off at a limit.

    Attributes:
      dtype: the dtype of the squares and their sums.
      largest: the largest integer whose square is not cut off.
      limit: the limit of sums; twice the limit fits into the dtype.
    """

    dtype: Any
    largest: int
    limit: int

    def __call__(self, rows: jax.Array, start: Any, *operands: jax.Array) -> jax.Array:
        (coef,) = operands
        steps = jnp.clip(_round(rows, coef, start), -self.largest, self.largest)
        return jnp.square(steps.astype(self.dtype))  # right if a negative one wraps

    def add(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.minimum(a + b, jnp.asarray(self.limit, self.dtype))


_SQUARES_IN_32_BITS = _Squares(np.dtype(np.uint32), 2**15, 2**30)
_SQUARES_IN_64_BITS = _Squares(np.dtype(np.uint64), 2**24, 2**48)


def _round(rows: jax.Array, coef: jax.Array, start: Any) -> jax.Array:
    """Multiplies rows by coefficients, (B, n), and rounds to int32.

    The rounding is done in fixed point. Its threshold cycles with the position of the
    entry. So a gradient with many equal entries keeps its norm, which it would lose if
    all of them were rounded the same way. The only operation before it that rounds is
    one float product. The compiler cannot contract this product into an addition, so
    the check of the norm and the sum see the same integers.

    Args:
      rows: gradients, float32 or wider.
      coef: coefficients, (B,).
      start: the position of the first column.
    """
    scaled = (coef * 2.0**_FRACTION_BITS)[:, None].astype(rows.dtype) * rows
    position = jax.lax.broadcasted_iota(jnp.uint32, rows.shape, 1)
    position += jnp.asarray(start).astype(jnp.uint32)
    threshold = (position * _WEYL_STEP) >> np.uint32(32 - _FRACTION_BITS)
    return (scaled.astype(jnp.int32) + threshold.astype(jnp.int32)) >> _FRACTION_BITS
