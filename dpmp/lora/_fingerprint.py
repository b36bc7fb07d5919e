"""Fingerprints of arrays, which tell whether adapters belong to a base model."""

import functools
import hashlib
import math
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from dpmp import _validate
from dpmp._arrays import is_narrow, without_debugging
from dpmp._typing import PyTree
from dpmp.lora._names import by_path


def fingerprint(params: PyTree) -> str | None:
    """A hash of the names, types and values of arrays; None for traced arrays.

    Raises ValueError, with the names, for leaves that are no arrays of numbers.
    """
    arrays = by_path(params, is_leaf=None)
    if not all(map(_is_array, arrays.values())):
        _validate.fail(
            "params must be a tree of arrays. Turn numbers into arrays by "
            "jnp.asarray, and leave other values out, as by eqx.partition(model, "
            "eqx.is_array).",
            no_arrays=[path for path, x in arrays.items() if not _is_array(x)],
        )
    if any(isinstance(x, jax.core.Tracer) for x in arrays.values()):
        return None
    with without_debugging():
        sums = np.asarray([_checksum_of(x) for x in arrays.values()], np.uint32)
    types = [f"{path} {x.dtype} {x.shape}" for path, x in arrays.items()]
    content = "\n".join(types).encode() + sums.tobytes()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _is_array(x: Any) -> bool:
    kinds = jnp.number, jnp.bool_, jax.dtypes.extended
    return hasattr(x, "dtype") and any(jnp.issubdtype(x.dtype, y) for y in kinds)


def _checksum_of(x: Any) -> jax.Array:
    # An array may be known while another function is traced.
    with jax.ensure_compile_time_eval():
        x = jnp.asarray(x)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        if is_narrow(x):
            is_integer = jnp.issubdtype(x.dtype, jnp.integer)
            x = x.astype(jnp.int8 if is_integer else jnp.float32)
    return _program(x.shape, x.dtype, x.sharding)(x)


@functools.lru_cache(maxsize=1000)
def _program(
    shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding
) -> jax.stages.Compiled:
    """Compiles `checksum`, so that it can be called while a function is traced."""
    # Traced there, its indices would become constants as large as the array.
    like = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    return checksum.lower(like).compile()


@jax.jit
def checksum(x: jax.Array) -> jax.Array:
    """The sum of all 32-bit words, each mixed with its place, modulo 2^32.

    It changes with every change of one word. If more words change, it stays the same
    with a probability of about 2^-32. It does not depend on the sharding.
    """
    words = _words(x)
    index = jnp.zeros((), jnp.uint32)
    for axis in range(words.ndim):
        stride = math.prod(words.shape[axis + 1 :]) % 2**32
        iota = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        index = index + iota * jnp.uint32(stride)
    return jnp.sum(_mixed(words + index * jnp.uint32(0x9E3779B1)), dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    """The bits of an array of any type, as uint32."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    if x.dtype.itemsize == 1:
        x = x.astype(jnp.float32)  # has every value of these small types
    bits = min(8 * x.dtype.itemsize, 32)
    return jax.lax.bitcast_convert_type(x, f"uint{bits}").astype(jnp.uint32)


def _mixed(words: jax.Array) -> jax.Array:
    """Mixes all bits of each word; different words have different results."""
    # The last stage of MurmurHash3 (https://github.com/aappleby/smhasher). Without it,
    # the sum could stay the same if an array were doubled, or all its signs changed.
    words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
    return words ^ (words >> 16)
