"""Sums of clipped gradients in integers on a grid: exact, in any order.

One unit of the grid is the largest contribution of an example over `resolution`. A
contribution is rounded to integers q, and counts only if

    sum of q^2 <= radius^2

holds in integer arithmetic, for every clipping group; otherwise zero is selected. What
the floats before did, in which order, and what a compiler made of them does not matter
any more. Integers are added modulo 2^32, which has no rounding and no order: the
sensitivity is `resolution` units for a batch of any size, however it is cut up.
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
      resolution: how many units of the grid the largest contribution has.
      grid: that of the sum, once the clip norms are known.
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
            "exact sums need gradients that are there to be rounded and checked",
            method=method,
            arithmetic=self.name,
            fix='Use arithmetic="bounded" in its place, or method="per_example".',
        )

    def for_clip_norms(
        self, bounds: Sequence[float], l2_norm_bound: float
    ) -> "ExactSums":
        """See `Arithmetic`."""
        grid = Grid.from_bounds(bounds, l2_norm_bound, self.resolution)
        return dataclasses.replace(self, grid=grid)

    def check_batch(self, batch_size: int, microbatch_size: int) -> None:
        """Warns of sums that can wrap around."""
        del microbatch_size
        self.grid.warn_of_overflow(batch_size)

    def targets(
        self, targets: list[tuple[float, Any]], num_entries: list[int]
    ) -> list[tuple[float, Any]]:
        """The norms to clip to, and the largest coefficients, in units.

        Rounding adds at most 1/4 to the square of an entry, on average, and all
        entries together stray from that by about the radius.
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
        """Exact sums need no 64-bit mode."""

    def check_not_mapped(self) -> None:
        """Integers may be added over devices."""

    def admit(
        self, stack: list[StoredArray], coef: jax.Array, keep: jax.Array, group: int
    ) -> jax.Array:
        """Which examples contribute: those that are kept and within the radius.

        Args:
          stack: the arrays of a clipping group, (B, n).
          coef: (B,) coefficients, from gradients to units.
          keep: (B,) bool.
          group: the number of the group.
        """
        return keep & _is_within(stack, coef, self.grid.radii[group])

    def contribution(
        self, row: jax.Array, coef: jax.Array, zero: jax.Array
    ) -> jax.Array:
        """What an example adds to the sum: (n,).

        Args:
          row: its entries.
          coef: its coefficient.
          zero: an int32 that the compiler does not know. It would keep the thresholds
            of all positions in memory.
        """
        return _round(row[None], coef[None], zero)[0]

    def add_block(self, terms: list[jax.Array]) -> jax.Array:
        """The sum of a few contributions."""
        return _reduction.pairwise(terms, self.add)

    def add(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """The sum of two parts of a batch."""
        return a + b

    def finish(self, total: PyTree) -> PyTree:
        """A tree of sums, with the unit that they are counted in."""
        return self.grid.finish(total)

    def wanted_resolution(self, num_parameters: int) -> float:
        """See `Arithmetic`."""
        return math.sqrt(100 * num_parameters)

    def share_lost(self, num_parameters: int, resolution: int) -> float:
        """See `Arithmetic`; what `targets` takes."""
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
    """Whether the sum of squares is at most that of the radius, exactly: (B,) bool.

    Squares and sums are cut off at a power of two above `radius`^2, before they can
    exceed their dtype.
    """
    fits_32_bits = radius < 2**15
    with jax.enable_x64(not fits_32_bits or jax.config.read("jax_enable_x64")):
        squares = _SQUARES_IN_32_BITS if fits_32_bits else _SQUARES_IN_64_BITS
        total, _ = _reduction.sum_entries(stack, squares, squares.add, coef)
        return total <= jnp.asarray(radius**2, squares.dtype)


@dataclasses.dataclass(frozen=True)
class _Squares:
    """Of the integers that gradients are rounded to, cut off.

    Attributes:
      dtype: of the squares and their sums.
      largest: integer whose square is not cut off.
      limit: of sums; twice as much fits into the dtype.
    """

    dtype: Any
    largest: int
    limit: int

    def __call__(self, rows: jax.Array, start: Any, *operands: jax.Array) -> jax.Array:
        (coef,) = operands
        steps = jnp.clip(_round(rows, coef, start), -self.largest, self.largest)
        return jnp.square(steps.astype(self.dtype))  # of negative ones too, modulo 2^32

    def add(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.minimum(a + b, jnp.asarray(self.limit, self.dtype))


_SQUARES_IN_32_BITS = _Squares(np.dtype(np.uint32), 2**15, 2**30)
_SQUARES_IN_64_BITS = _Squares(np.dtype(np.uint64), 2**24, 2**48)


def _round(rows: jax.Array, coef: jax.Array, start: Any) -> jax.Array:
    """Coefficient times row, (B, n), rounded to int32.

    It is done in fixed point, with a threshold that goes round with the position of
    the entry: gradients with many equal entries, which would all be rounded the same
    way, keep their norm. A float product is all that is rounded before; it cannot be
    contracted into an addition, so that norm and sum see the same integers.

    Args:
      rows: float32 or wider.
      coef: (B,).
      start: the position of the first column.
    """
    scaled = (coef * 2.0**_FRACTION_BITS)[:, None].astype(rows.dtype) * rows
    position = jax.lax.broadcasted_iota(jnp.uint32, rows.shape, 1)
    position += jnp.asarray(start).astype(jnp.uint32)
    threshold = (position * _WEYL_STEP) >> np.uint32(32 - _FRACTION_BITS)
    return (scaled.astype(jnp.int32) + threshold.astype(jnp.int32)) >> _FRACTION_BITS
