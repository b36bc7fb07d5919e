"""Per-example squared norms in floats, with their numbers of roundings."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpmp.numerics import reduction
from dpmp.numerics._stored import StoredArray

_SMALLEST_NORMAL = 2.0**-126


class SquaredNorm(NamedTuple):
    """Per-example squared norms of one clipping group, with their rounding error.

    Attributes:
      value: the computed sums of squares, (B,), float32 or wider.
      roundings: the largest number of roundings on any path from an entry to `value`:
        one for its square, unless the square is exact, and one for each addition.
      num_entries: the number of squares in each sum.
      bound: an upper bound on the squared norm of the contribution for a coefficient of
        1, (B,), or None. Clipping uses it in place of `value`.
    """

    value: jax.Array
    roundings: int
    num_entries: int
    bound: jax.Array | None = None

    @property
    def underflow(self) -> float:
        """An upper bound on the sum of squares that were flushed to zero."""
        return max(self.num_entries, 1) * _SMALLEST_NORMAL


def squared_norm(stack: list[StoredArray]) -> SquaredNorm:
    """Computes per-example squared norms over at least one array."""
    value, depth = reduction.sum_entries(stack, _square, jnp.add)
    # Squares of 16-bit floats are exact in float32, unless they are flushed to zero.
    rounded_square = any(x.dtype.itemsize > 2 for x in stack)
    return SquaredNorm(
        value, depth + rounded_square, sum(x.bits.shape[1] for x in stack)
    )


def _square(rows: jax.Array, start: Any, *operands: jax.Array) -> jax.Array:
    del start, operands
    return jnp.square(rows)
