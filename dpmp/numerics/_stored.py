"""Arrays whose bits are settled, so that every reader of them sees the same numbers.

A compiler may compute a value again where it is used a second time, contract a product
into an addition there and not here, or keep the float32 behind a value that was rounded
to 16 bits. The norm of a gradient would then be that of other numbers than the ones
that are summed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dpmp._fence import behind_a_branch
from dpmp._typing import PyTree


@dataclass(frozen=True)
class StoredArray:
    """A stack of per-example arrays, flattened, with 16-bit floats held as integers.

    These keep XLA from computing slices of 16-bit floats from a float32 copy of the
    whole stack. An instance is a leaf of its pytree.

    Attributes:
      bits: (B, n), uint16 for 16-bit floats.
      dtype: of the floats.
      shape: of one example.
    """

    bits: jax.Array
    dtype: Any
    shape: tuple[int, ...]

    def load(self, start: Any, size: int) -> jax.Array:
        """A range of the entries of all examples, in float32 or wider: (B, size)."""
        return to_float(columns_of(self.bits, start, size), self.dtype)


def to_float(bits: jax.Array, dtype: Any) -> jax.Array:
    """Stored bits as floats of 32 bits or more."""
    if dtype == jnp.bfloat16:  # the upper half of a float32
        return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)
    if bits.dtype != dtype:
        bits = jax.lax.bitcast_convert_type(bits, dtype)
    return bits.astype(at_least_float32(dtype))


def at_least_float32(*dtypes: Any) -> Any:
    """The widest of float32 and those of some dtypes that are floats."""
    floats = [d for d in map(jnp.dtype, dtypes) if jnp.issubdtype(d, jnp.floating)]
    return max((jnp.dtype(jnp.float32), *floats), key=lambda d: d.itemsize)


def columns_of(x: jax.Array, start: Any, size: int) -> jax.Array:
    """Some columns of a matrix, from a number on that may be traced.

    Columns beyond the last one are zeros; of them there are none if it is traced.
    """
    if size == x.shape[1]:
        return x
    if isinstance(start, int):
        stop = min(start + size, x.shape[1])
        columns = jax.lax.slice_in_dim(x, min(start, stop), stop, axis=1)
        missing = size - columns.shape[1]
        return jnp.pad(columns, [(0, 0), (0, missing)]) if missing else columns
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)


def rows_of_block(x: jax.Array, block: Any, size: int) -> list[jax.Array]:
    """Of `len(x) / size` blocks of examples, the rows of one.

    A block is made of rows that are far apart, so that no block of an array that is
    sharded by examples lies on one device alone.
    """
    num_blocks = x.shape[0] // size
    blocks = x.reshape(size, num_blocks, *x.shape[1:])

    def row(j: int) -> jax.Array:
        # Each row is taken from a block of its own, by an index that the compiler does
        # not know to be the same: a block with many readers becomes a function that
        # loads its index for every entry, and no loop over entries is vectorised.
        index = jnp.minimum(block, num_blocks - 1 + j)
        return jax.lax.dynamic_index_in_dim(blocks, index, 1, keepdims=False)[j]

    return [row(j) for j in range(size)]


def compute_and_store(
    compute: Callable[[], tuple[PyTree, PyTree]], witness: PyTree
) -> tuple[PyTree, PyTree]:
    """Stores the first part of what `compute` returns, leaving the second as it is.

    Args:
      compute: gives a tree of stacked float arrays, (B, ...), and anything else.
      witness: arrays, at least one of them not a constant of the program.

    Returns:
      The tree with its leaves as `StoredArray`, and the second part.
    """
    compute = jax.jit(compute)  # so that it is traced once
    shapes, _ = jax.eval_shape(compute)

    def compute_bits():
        grads, rest = compute()
        return jax.tree.map(_to_bits, grads), rest

    bits, rest = behind_a_branch(compute_bits, witness)
    stored = jax.tree.map(
        lambda x, s: StoredArray(x, s.dtype, s.shape[1:]), bits, shapes
    )
    return stored, rest


def _to_bits(x: jax.Array) -> jax.Array:
    x = x.reshape(x.shape[0], math.prod(x.shape[1:]))
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x
