"""Grids of integers: multiples of one unit, in which clip norms are whole numbers."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import _validate
from dpmp._numbers import as_number, as_real
from dpmp._typing import PyTree
from dpmp.numerics._stored import at_least_float32

# Squares of that many units fit into 32 bits, with one bit to see an overflow.
DEFAULT_RESOLUTION = 2**15 - 1

# Up to here, integers with eight more bits are exact in float32 and fit into int32.
LARGEST_RESOLUTION = 2**22

# The share of a clip norm that rounding may take.
LARGEST_LOSS = 0.05


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["steps"], meta_fields=["unit"]
)
@dataclasses.dataclass(frozen=True)
class GridArray:
    """An array of multiples of one number: `steps * unit`.

    It is what `clipped_grad(..., arithmetic="exact")` returns for each leaf. Such sums
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

    @property
    def is_on_grid(self) -> bool:
        """See `Sum`."""
        return True

    def to_float(self) -> jax.Array:
        """The float32 numbers that are nearest."""
        return self.steps.astype(jnp.float32) * np.float32(self.unit)

    def words(self) -> tuple[jax.Array, None]:
        """See `Sum`."""
        return self.to_float(), None

    def snapped(self, unit: float) -> "GridArray":
        """See `Sum`: it has a grid of its own."""
        del unit
        return self

    def check_before_noise(self, leaf: int) -> None:
        """See `Sum`."""
        # Integer noise hides nothing of a fraction.
        _validate.require(
            self.steps.dtype == jnp.dtype("int32"),
            "the steps of an exact sum must be int32 until they have noise",
            leaf=leaf,
            dtype=self.steps.dtype.name,
            fix="Add parts up (psum, not pmean), divide by normalize_by, and do the "
            "rest after the noise.",
        )


@dataclasses.dataclass(frozen=True)
class Grid:
    """A grid for some clip norms.

    Attributes:
      radii: the largest norm of each clipping group, in units.
      resolution: the largest norm of all of them together.
      unit: of the grid.
    """

    radii: tuple[int, ...]
    resolution: int
    unit: float

    UNKNOWN: ClassVar["Grid"]

    @classmethod
    def from_bounds(
        cls, bounds: Sequence[float], l2_norm_bound: float, resolution: int
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
            fix='Use arithmetic="float32" where nothing is to be private (with '
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

    def warn_of_overflow(self, batch_size: int) -> None:
        """Warns of sums that can wrap around."""
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
            'arithmetic="float32x2".',
        )

    def in_units(self, x: Any) -> Any:
        """A coefficient, as one from gradients to units."""
        return x / self.unit if self.unit else 0.0

    def finish(self, total: PyTree) -> PyTree:
        """A tree of sums, with the unit that they are counted in."""
        return jax.tree.map(lambda steps: GridArray(steps, self.unit), total)


Grid.UNKNOWN = Grid((), 0, 0.0)  # before the clip norms are known


def snap(hi: jax.Array, lo: jax.Array | None, unit: float) -> GridArray:
    """A float sum, or one of two words, rounded to multiples of a power of two.

    Scaling by a power of two is exact, and rounding moves an entry by at most half a
    unit (and 2^-24, where both words matter).
    """
    scaled = hi.astype(at_least_float32(hi.dtype)) * (1 / unit)
    whole = jnp.round(scaled)
    steps = _to_integers(whole, 2**31 - 2**26)
    if lo is not None:
        steps += _to_integers(jnp.round((scaled - whole) + lo * (1 / unit)), 2**20)
    # What was cut off at the first limit is well beyond this one, whatever `lo` adds.
    return GridArray(jnp.clip(steps, -(2**31) + 2**27, 2**31 - 2**27), unit)


def _to_integers(x: jax.Array, limit: int) -> jax.Array:
    return jnp.clip(x, -limit, limit).astype(jnp.int32)


def check_float(x: jax.Array, leaf: int) -> None:
    """Raises ValueError for what is no array of floats."""
    dtype = jnp.result_type(x)
    _validate.require(
        jnp.issubdtype(dtype, jnp.floating),
        "every leaf of sum_of_clipped_grads must be a real float array",
        leaf=leaf,
        dtype=dtype.name,
        fix="Add noise to the output of clipped_grad, before anything else.",
    )
