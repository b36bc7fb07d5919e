"""Sums of clipped gradients in integers on a grid: exact, in any order.

Each contribution is rounded to integers q. The part of a clipping group counts only if
sum(q^2) <= max_norm^2 in integer arithmetic. Otherwise zero is selected. Integers are
added modulo 2^32. docs/proofs.md has the proof.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpmp._fence import StoredArray
from dpmp.numerics import reduction
from dpmp.numerics._grid import DEFAULT_RESOLUTION, GridSums
from dpmp.numerics._interface import GradientSums

_FRACTION_BITS = 8
_WEYL_STEP = np.uint32(0x9E3779B1)  # 2^32 over the golden ratio


@dataclasses.dataclass(frozen=True)
class ExactSums(GridSums, GradientSums):
    """The "exact" arithmetic of `clipped_grad`, with a resolution to choose.

    Attributes:
      resolution: how many units of the grid the largest contribution has, up to 2^22.
    """

    resolution: int = DEFAULT_RESOLUTION

    name = "exact"
    method = "per_example"
    assumption = "The product of two given floats is the same every time."

    def max_norm_before_rounding(self, max_norm: int, size: int) -> float:
        # On average, rounding adds at most 1/4 to the square of an entry. The sum over
        # all entries deviates from that average by about the max_norm.
        return math.sqrt(max(max_norm**2 - size / 4 - 6 * max_norm, 0))

    def passes_norm_check(
        self, stack: list[StoredArray], coef: jax.Array, keep: jax.Array, group: int
    ) -> jax.Array:
        return keep & _has_norm_at_most(stack, coef, self.max_norms[group])

    def contribution(
        self, row: jax.Array, coef: jax.Array, zero: jax.Array
    ) -> jax.Array:
        # With a known zero, the compiler would store the thresholds of all positions.
        return _round(row[None], coef[None], zero)[0]

    def wanted_resolution(self, num_parameters: int) -> float:
        return math.sqrt(100 * num_parameters)

    def rounding_share(self, num_parameters: int, resolution: int) -> float:
        # To first order, `max_norm_before_rounding` takes this share.
        return num_parameters / (8 * resolution**2) + 3 / resolution

    def describe(self, resolution: int | None, microbatch_size: int | None) -> str:
        del microbatch_size
        return (
            f"clipped gradients are rounded to a grid on which the largest "
            f"contribution has {resolution} units; their norms are checked, and they "
            f"are summed, in integers, without rounding."
        )


def _has_norm_at_most(
    stack: list[StoredArray], coef: jax.Array, max_norm: int
) -> jax.Array:
    """Whether the sum of squares is at most max_norm^2, exactly: (B,) bool."""
    # Squares and sums are cut off at a power of two above the squared max_norm, so that
    # they never exceed their dtype.
    fits_32_bits = max_norm < 2**15
    with jax.enable_x64(not fits_32_bits or jax.config.read("jax_enable_x64")):
        squares = _SQUARES_IN_32_BITS if fits_32_bits else _SQUARES_IN_64_BITS
        total, _ = reduction.sum_entries(stack, squares, squares.add, coef)
        return total <= jnp.asarray(max_norm**2, squares.dtype)


@dataclasses.dataclass(frozen=True)
class _Squares:
    """Squares of the integers that gradients are rounded to, cut off at a limit."""

    dtype: Any
    largest: int  # the largest integer whose square is not cut off
    limit: int  # the limit of sums; twice the limit fits into the dtype

    def __call__(self, rows: jax.Array, start: Any, *operands: jax.Array) -> jax.Array:
        (coef,) = operands
        largest = np.int32(self.largest)
        counts = jax.lax.clamp(-largest, _round(rows, coef, start), largest)
        return jnp.square(counts.astype(self.dtype))  # correct for negative counts too

    def add(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.minimum(a + b, jnp.asarray(self.limit, self.dtype))


_SQUARES_IN_32_BITS = _Squares(np.dtype(np.uint32), 2**15, 2**30)
_SQUARES_IN_64_BITS = _Squares(np.dtype(np.uint64), 2**24, 2**48)


def _round(rows: jax.Array, coef: jax.Array, start: Any) -> jax.Array:
    """Multiplies rows, (B, n) from column `start`, by coefficients and rounds to int32.

    The rounding is done in fixed point. Its threshold cycles with the position of the
    entry. So a gradient with many equal entries keeps its norm, which it would lose if
    all of them were rounded the same way. The only rounding before that is one float
    product. The compiler cannot contract this product into an addition, so the norm
    check and the sum see the same integers.
    """
    scaled = (coef * 2.0**_FRACTION_BITS)[:, None].astype(rows.dtype) * rows
    position = jax.lax.broadcasted_iota(jnp.uint32, rows.shape, 1)
    position += jnp.asarray(start).astype(jnp.uint32)
    threshold = (position * _WEYL_STEP) >> np.uint32(32 - _FRACTION_BITS)
    return (scaled.astype(jnp.int32) + threshold.astype(jnp.int32)) >> _FRACTION_BITS
