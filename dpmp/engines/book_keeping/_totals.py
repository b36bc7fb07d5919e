"""Sums of squares, in an order with few roundings on any path.

The compiler adds up rows of about sqrt(n) entries, in an order of its choice. A tree of
elementwise additions then adds up the sums of all rows. The compiler keeps the order of
these additions.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dpmp.numerics._stored import at_least_float32


@jax.jit  # a program has one copy for all arrays of one shape
def of_rows(x: jax.Array) -> jax.Array:
    """Sums the rows, which are parts of the sum of all entries: (P,)."""
    columns = _num_columns(x.size)
    return jnp.sum(jnp.pad(x.ravel(), (0, -x.size % columns)).reshape(-1, columns), 1)


def joined(parts: Sequence[jax.Array]) -> jax.Array:
    """Joins the parts along the last axis, in the widest dtype."""
    dtype = at_least_float32(*(x.dtype for x in parts))
    return jnp.concatenate([x.astype(dtype) for x in parts], axis=-1)


def add_up(parts: jax.Array, axis: int = -1) -> jax.Array:
    """Sums over an axis."""
    while (size := parts.shape[axis]) > 1:
        first, second, rest = jnp.split(parts, [size // 2, size // 2 * 2], axis)
        parts = jnp.concatenate([first + second, rest], axis)
    return parts.sum(axis) if size == 0 else parts.squeeze(axis)


def num_roundings(size: int) -> int:
    """The number of roundings on any path from one of `size` entries to their sum."""
    columns = _num_columns(size)
    return columns + depth(math.ceil(size / columns))


def depth(num_parts: int) -> int:
    """The depth of the tree that adds up the parts."""
    return math.ceil(math.log2(max(num_parts, 1)))


def _num_columns(size: int) -> int:
    return 2 ** math.ceil(math.log2(max(size, 1)) / 2)
