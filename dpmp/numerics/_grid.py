"""Sums of clipped gradients on a grid of integers: exact, in any order.

One unit of the grid is the largest contribution of an example over `resolution`. A
contribution is rounded to integers q, and counts only if

    sum of q^2 <= radius^2

holds in integer arithmetic, for every clipping group; otherwise zero is selected. What
the floats before did, in which order, and what a compiler made of them does not matter
any more. Integers are added modulo 2^32, which has no rounding and no order: the
sensitivity is `resolution` units for a batch of any size, however it is cut up.
"""

import dataclasses
import functools
import math
import warnings
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import _validate
from dpmp._numbers import as_number, as_real
from dpmp._typing import PyTree
from dpmp.numerics import _reduction
from dpmp.numerics._stored import StoredArray

# Squares of that many units fit into 32 bits, with one bit to see an overflow.
DEFAULT_RESOLUTION = 2**15 - 1

# Up to here, integers times 2**_FRACTION_BITS are exact in float32 and fit into int32.
LARGEST_RESOLUTION = 2**22

# The share of a clip norm that rounding may take.
LARGEST_LOSS = 0.05

_FRACTION_BITS = 8
_WEYL_STEP = np.uint32(0x9E3779B1)  # 2^32 over the golden ratio


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["steps"], meta_fields=["unit"]
)
@dataclasses.dataclass(frozen=True)
class GridArray:
    """An array of multiples of one number: `steps * unit`.

    It is what `clipped_grad(..., accumulator="exact")` returns for each leaf. Such sums
    may be added (`jax.lax.psum`), and nothing else: noise comes before any division and
    any rounding (`dpmp.noise_addition` insists).

    Attributes:
      steps: int32, modulo 2^32.
      unit: of the grid, a float32 number.
    """

    steps: jax.Array
    unit: float

    def __post_init__(self):
        object.__setattr__(self, "unit", as_real(self.unit))

    def to_float(self) -> jax.Array:
        """The float32 numbers that are nearest."""
        return self.steps.astype(jnp.float32) * np.float32(self.unit)


@dataclasses.dataclass(frozen=True)
class Grid:
    """Exact sums on a grid; the counterpart of `Accumulator`.

    Attributes:
      radii: the largest norm of each clipping group, in units.
      resolution: the largest norm of all of them together.
      unit: of the grid.
    """

    radii: tuple[int, ...]
    resolution: int
    unit: float

    @classmethod
    def from_bounds(
        cls, bounds: list[float], l2_norm_bound: float, resolution: int
    ) -> "Grid":
        """A grid on which the groups are bounded as they are in real numbers.

        Args:
          bounds: the largest norm of each group.
          l2_norm_bound: the largest norm of all of them together.
          resolution: the same, in units of the grid.

        Raises:
          ValueError: for a resolution that is out of range, and for infinite bounds.
        """
        resolution = as_number(resolution)
        _validate.require(
            _validate.is_integer(resolution) and 0 < resolution <= LARGEST_RESOLUTION,
            f"resolution must be an integer from 1 to {LARGEST_RESOLUTION}",
            resolution=resolution,
            fix=f"Leave it out for {DEFAULT_RESOLUTION}.",
        )
        _validate.require(
            math.isfinite(l2_norm_bound),
            "exact sums need a finite clip norm, and nan_safe=True",
            l2_norm_bound=l2_norm_bound,
            fix='Use accumulator="float32" where nothing is to be private (with '
            'book-keeping "unproved_float32"; in DPSGD: without_privacy()).',
        )
        squares = [Fraction(bound) ** 2 for bound in bounds]
        total = max(sum(squares), Fraction(l2_norm_bound) ** 2)
        scale = Fraction(resolution**2) / (total or 1)
        unit = np.float32(l2_norm_bound / resolution)
        if float(unit) * resolution > l2_norm_bound:
            unit = np.nextafter(unit, np.float32(0))
        return cls(
            radii=tuple(math.isqrt(int(square * scale)) for square in squares),
            resolution=resolution,
            unit=float(unit),
        )

    def check_batch(self, batch_size: int, microbatch_size: int) -> None:
        """Warns of sums that can wrap around."""
        del microbatch_size
        largest = (2**31 - 1) // self.resolution
        if batch_size > largest:
            warnings.warn(
                f"sums of {batch_size} examples at a resolution of {self.resolution} "
                f"can exceed 32 bits if the gradients of all examples point in one "
                f"direction, along one coordinate. That costs accuracy, not privacy. "
                f"Use a batch of at most {largest}, or a lower resolution, or "
                f'"float32x2" instead of "exact".',
                stacklevel=2,
            )

    def targets(
        self, targets: list[tuple[float, float]], num_entries: list[int]
    ) -> list[tuple[float, float]]:
        """The norms to clip to, and the largest coefficients, in units.

        Rounding adds at most 1/4 to the square of an entry, on average, and all
        entries together stray from that by about the radius.
        """
        scaled = []
        for (bound, cap), radius, size in zip(
            targets, self.radii, num_entries, strict=True
        ):
            room = size / 4 + 6 * radius
            largest = math.sqrt(max(radius**2 - room, 0))
            self.check_loss(largest, radius, size, bound)
            scaled.append((largest, cap / self.unit if self.unit else 0.0))
        return scaled

    def check_loss(self, left: float, radius: int, size: int, bound: float) -> None:
        """Raises ValueError for a grid so coarse that little is left of a clip norm.

        Args:
          left: what is left of the radius.
          radius: of the clipping group.
          size: the number of its entries.
          bound: its clip norm.
        """
        _validate.require(
            left >= (1 - LARGEST_LOSS) * radius > 0 or bound == 0,
            f"a resolution must be fine enough to round {size} entries at the cost of "
            f"{LARGEST_LOSS:.0%} of the clip norm",
            resolution=self.resolution,
            fix=f"Use a higher one, up to {LARGEST_RESOLUTION}, or "
            'accumulator="float32x2".',
        )

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
        return keep & _is_within(stack, coef, self.radii[group])

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
        return jax.tree.map(lambda steps: GridArray(steps, self.unit), total)


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
