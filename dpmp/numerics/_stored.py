"""Arrays whose bits are stored once, so that every reader sees the same numbers.

A compiler has several ways to change a value between two uses. It may compute the value
again for the second use. It may contract a product into an addition in one place and
not in the other. It may use the float32 number from which a 16-bit value was rounded.
The norm would then belong to other numbers than the sum.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dpmp._fence import materialize
from dpmp._typing import PyTree


@dataclass(frozen=True)
class StoredArray:
    """A stack of per-example arrays, flattened, with 16-bit floats held as integers.

    Integers stop XLA from computing slices of 16-bit floats from a float32 copy of the
    whole stack. An instance is one leaf of a pytree.

    Attributes:
      bits: the entries, (B, n), as uint16 for 16-bit floats.
      dtype: the dtype of the floats.
      shape: the shape of one example.
    """

    bits: jax.Array
    dtype: Any
    shape: tuple[int, ...]


def floats_of(bits: jax.Array, dtype: Any) -> jax.Array:
    """Converts stored bits to floats of 32 bits or more."""
    if dtype == jnp.bfloat16:  # the upper half of a float32
        return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)
    if bits.dtype != dtype:
        bits = jax.lax.bitcast_convert_type(bits, dtype)
    return bits.astype(at_least_float32(dtype))


def at_least_float32(*dtypes: Any) -> Any:
    """The widest float dtype among float32 and the given dtypes."""
    floats = [d for d in map(jnp.dtype, dtypes) if jnp.issubdtype(d, jnp.floating)]
    return max((jnp.dtype(jnp.float32), *floats), key=lambda d: d.itemsize)


def compute_and_store(
    compute: Callable[[], tuple[PyTree, PyTree]], depends_on: PyTree
) -> tuple[PyTree, PyTree]:
    """Stores the first result of `compute`, and leaves the second as it is.

    The first is a tree of float arrays, (B, ...); its leaves become `StoredArray`s. At
    least one array of `depends_on` is not a constant of the program.
    """
    compute = jax.jit(compute)  # so that it is traced once
    shapes, _ = jax.eval_shape(compute)

    def compute_bits():
        grads, rest = compute()
        return jax.tree.map(_to_bits, grads), rest

    bits, rest = materialize(compute_bits, depends_on)
    stored = jax.tree.map(
        lambda x, s: StoredArray(x, s.dtype, s.shape[1:]), bits, shapes
    )
    return stored, rest


def _to_bits(x: jax.Array) -> jax.Array:
    x = x.reshape(x.shape[0], math.prod(x.shape[1:]))
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x
