"""float32 to bfloat16, up or down at random, so that the mean is what was rounded.

Rounding to nearest loses every update below half a unit in the last place, 2^-9 of the
parameter: training stands still. Rounded at random, an update of a tenth of a unit
moves the parameter by a unit in one step out of ten.

References:
  Gupta et al.: Deep learning with limited numerical precision, 2015, section 3.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from dpmp import _random
from dpmp._fence import behind_a_branch
from dpmp._typing import PyTree
from dpmp.numerics import _packing

_DROPPED_BITS = 16


def round_like(tree: PyTree, like: PyTree, prng_key: jax.Array) -> PyTree:
    """The leaves of a float32 tree that are bfloat16 in another, rounded at random."""
    leaves, treedef = jax.tree.flatten(tree)
    is_rounded = [dtype == jnp.bfloat16 for dtype in _dtypes(like)]
    numbers = [i for i, rounds in enumerate(is_rounded) if rounds]
    draws = _packing.draws([leaves[i].shape for i in numbers], [None] * len(numbers))
    keys = _random.split(prng_key, max(len(draws), 1))
    for draw, key in zip(draws, keys, strict=False):
        some = {i: leaves[numbers[i]] for i in draw.ranges}
        # A branch, as the bits would be drawn anew for whatever reads a parameter.
        rounded = behind_a_branch(
            functools.partial(_round_draw, draw, some, key), jax.random.key_data(key)
        )
        for i, x in rounded.items():
            leaves[numbers[i]] = x
    return treedef.unflatten(leaves)


def _round_draw(
    draw: _packing.Draw, leaves: dict[int, jax.Array], key: jax.Array
) -> dict[int, jax.Array]:
    """The leaves of a draw, by number, rounded."""

    def sample() -> jax.Array:
        return jax.random.bits(key, draw.shape, jnp.uint16)

    if len(leaves) == 1:
        return {
            i: _to_bfloat16(x, sample().reshape(x.shape)) for i, x in leaves.items()
        }
    bits = behind_a_branch(sample, jax.random.key_data(key))
    return {
        i: _to_bfloat16(
            leaves[i], jax.lax.slice_in_dim(bits, start, stop).reshape(leaves[i].shape)
        )
        for i, (start, stop) in draw.ranges.items()
    }


def _dtypes(tree: PyTree) -> list[Any]:
    return [jnp.result_type(x) for x in jax.tree.leaves(tree)]


def _to_bfloat16(x: jax.Array, random_bits: jax.Array) -> jax.Array:
    """Of a float32 array; what is not finite, or would not be, is rounded to nearest.

    The bits of a float are those of its magnitude, in order. Adding a random number to
    them that has as many bits as are dropped carries into the last bit that is kept
    with a probability of what is dropped, over a unit.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noisy = bits + random_bits.astype(jnp.uint32)
    kept = jax.lax.shift_right_logical(noisy, jnp.uint32(_DROPPED_BITS))
    rounded = jax.lax.bitcast_convert_type(kept.astype(jnp.uint16), jnp.bfloat16)
    in_range = jnp.abs(x) <= float(jnp.finfo(jnp.bfloat16).max)
    return jnp.where(in_range, rounded, x.astype(jnp.bfloat16))
