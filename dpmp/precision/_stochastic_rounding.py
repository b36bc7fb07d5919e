"""Rounds float32 to bfloat16, up or down at random, without changing the mean.

Rounding to nearest loses every update below half a unit in the last place, which is
2^-9 of the parameter, so training stops. With random rounding, an update of a tenth of
a unit moves the parameter by a unit in one step out of ten.

References:
  Gupta et al.: Deep learning with limited numerical precision, 2015, section 3.
"""

import functools

import jax
import jax.numpy as jnp

from dpmp import _random
from dpmp._fence import materialize
from dpmp._typing import PyTree
from dpmp.numerics import packing

_DROPPED_BITS = 16


def round_like(tree: PyTree, like: PyTree, prng_key: jax.Array) -> PyTree:
    """Rounds a float32 tree at random, for the leaves that are bfloat16 in `like`."""
    leaves, treedef = jax.tree.flatten(tree)
    dtypes = [jnp.result_type(x) for x in jax.tree.leaves(like)]
    numbers = [i for i, dtype in enumerate(dtypes) if dtype == jnp.bfloat16]
    draws = packing.draws([leaves[i].shape for i in numbers], [None] * len(numbers))
    keys = _random.split(prng_key, max(len(draws), 1))
    for draw, key in zip(draws, keys, strict=False):
        some = {i: leaves[numbers[i]] for i in draw.ranges}
        # Otherwise every reader of a parameter would draw the bits again.
        rounded = materialize(
            functools.partial(_round_draw, draw, some, key), jax.random.key_data(key)
        )
        for i, x in rounded.items():
            leaves[numbers[i]] = x
    return treedef.unflatten(leaves)


def _round_draw(
    draw: packing.Draw, leaves: dict[int, jax.Array], key: jax.Array
) -> dict[int, jax.Array]:
    """Rounds the leaves of a draw; returns them by number."""

    def sample() -> jax.Array:
        return jax.random.bits(key, draw.shape, jnp.uint16)

    bits = draw.divided(sample, jax.random.key_data(key))
    return {i: _to_bfloat16(x, bits[i].reshape(x.shape)) for i, x in leaves.items()}


def _to_bfloat16(x: jax.Array, random_bits: jax.Array) -> jax.Array:
    """Rounds a float32 array at random; infinity, NaN and overflows to nearest.

    The bits of a float below its sign, read as an integer, grow with its magnitude. A
    random number with as many bits as are dropped is added to them. The probability of
    a carry into the last remaining bit is the dropped part, as a fraction of one unit
    of that bit.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noisy = bits + random_bits.astype(jnp.uint32)
    kept = jax.lax.shift_right_logical(noisy, jnp.uint32(_DROPPED_BITS))
    rounded = jax.lax.bitcast_convert_type(kept.astype(jnp.uint16), jnp.bfloat16)
    in_range = jnp.abs(x) <= float(jnp.finfo(jnp.bfloat16).max)
    return jnp.where(in_range, rounded, x.astype(jnp.bfloat16))
