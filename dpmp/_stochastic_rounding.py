"""float32 to bfloat16, up or down at random, so that the mean is what was rounded.

Rounding to nearest loses every update below half a unit in the last place, 2^-9 of the
parameter: training stands still. Rounded at random, an update of a tenth of a unit
moves the parameter by a unit in one step out of ten.

References:
  Gupta et al.: Deep learning with limited numerical precision, 2015, section 3.
"""

from typing import Any

import jax
import jax.numpy as jnp

from dpmp._typing import PyTree

_DROPPED_BITS = 16


def round_like(tree: PyTree, like: PyTree, prng_key: jax.Array) -> PyTree:
    """The leaves of a float32 tree that are bfloat16 in another, rounded at random."""
    leaves, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(prng_key, max(len(leaves), 1))
    rounded = [
        _to_bfloat16(x, key) if dtype == jnp.bfloat16 else x
        for x, dtype, key in zip(leaves, _dtypes(like), keys, strict=False)
    ]
    return treedef.unflatten(rounded)


def _dtypes(tree: PyTree) -> list[Any]:
    return [jnp.result_type(x) for x in jax.tree.leaves(tree)]


def _to_bfloat16(x: jax.Array, prng_key: jax.Array) -> jax.Array:
    """Of a float32 array; what is not finite, or would not be, is rounded to nearest.

    The bits of a float are those of its magnitude, in order. Adding a random number to
    them that has as many bits as are dropped carries into the last bit that is kept
    with a probability of what is dropped, over a unit.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(prng_key, x.shape, jnp.uint16).astype(jnp.uint32)
    kept = jax.lax.shift_right_logical(bits + noise, jnp.uint32(_DROPPED_BITS))
    rounded = jax.lax.bitcast_convert_type(kept.astype(jnp.uint16), jnp.bfloat16)
    in_range = jnp.abs(x) <= float(jnp.finfo(jnp.bfloat16).max)
    return jnp.where(in_range, rounded, x.astype(jnp.bfloat16))
