"""Keys with 128 bits of entropy from the operating system."""

import functools
import os
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.core
import jax.extend.random
import jax.numpy as jnp
import numpy as np

from dpmp import _validate
from dpmp._fence import behind_a_branch
from dpmp._threefry import threefry4x32

_KEY_BYTES = 16


def fresh_key() -> jax.Array:
    """A new 128-bit key.

    Raises:
      ValueError: while jax traces: the key would be a constant of the program, and its
        noise would repeat whenever that runs.
    """
    # Under a transformation that traces, any new array is traced.
    _validate.require(
        not isinstance(jnp.zeros(()), jax.core.Tracer),
        "a key from the system must be drawn outside of jax.jit and other "
        "transformations",
        traced=True,
        fix="Call init before the step is compiled, or pass prng_key.",
    )
    words = np.frombuffer(os.urandom(_KEY_BYTES), np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words), impl=_key_impl())


def fresh_integer() -> int:
    """A new 128-bit integer."""
    return int.from_bytes(os.urandom(_KEY_BYTES), "little")


def check_key(prng_key: Any) -> None:
    """Raises ValueError unless `prng_key` is one new-style jax key."""
    is_key = isinstance(prng_key, jax.Array) and jnp.issubdtype(
        prng_key.dtype, jax.dtypes.prng_key
    )
    _validate.require(
        is_key and prng_key.shape == (),
        "prng_key must be one key made by jax.random.key",
        # Not the keys themselves, which are secret.
        prng_key=str(jax.typeof(prng_key)) if is_key else type(prng_key).__name__,
        fix="Leave it out to draw 128 bits from the system; integers are refused "
        "because the noise is only as hard to guess as its key.",
    )


def fold_in(prng_key: jax.Array, data: Any) -> jax.Array:
    """`jax.random.fold_in`, computed once: see `_in_memory`."""
    return _in_memory(lambda: jax.random.fold_in(prng_key, data), prng_key)


def split(prng_key: jax.Array, num: int) -> jax.Array:
    """`jax.random.split`, computed once: see `_in_memory`."""
    return _in_memory(lambda: jax.random.split(prng_key, num), prng_key)


def _in_memory(derive: Callable[[], jax.Array], prng_key: jax.Array) -> jax.Array:
    """Keys that were derived from another one, in memory.

    Read from anywhere else they would be derived anew, with those that they derive
    from: every link of a chain would multiply the work, and the program.
    """
    words = behind_a_branch(
        lambda: jax.random.key_data(derive()), jax.random.key_data(prng_key)
    )
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(prng_key))


def key_words(prng_key: jax.Array) -> jax.Array:
    """The (4,) uint32 words of a key; those of shorter keys end in zeros."""
    words = jax.random.key_data(prng_key)
    return jnp.zeros(4, jnp.uint32).at[: words.size].set(words)


@functools.cache
def _key_impl() -> Hashable:
    """Keys of 128 bits; jax has them from 0.10.2 on."""
    try:
        jax.eval_shape(lambda: jax.random.key(0, impl="threefry4x32"))
    except ValueError:
        return define_key_impl("dpmp_threefry4x32")
    return "threefry4x32"


def define_key_impl(name: str) -> Hashable:
    """Keys that give the bits of jax's threefry4x32, for a jax that has none."""
    return jax.extend.random.define_prng_impl(
        key_shape=(4,),
        seed=_key_from_seed,
        split=lambda key, shape: _encrypt(key, 0, 0, *positions(shape)),
        random_bits=_random_bits,
        fold_in=_fold_in,
        name=name,
        tag="fry4",
    )


def positions(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """The place of every entry of an array: two uint32 arrays, distinct as pairs.

    The second is the flat index, as long as that fits into 32 bits, and otherwise the
    index within the longest run of last axes for which it does. Both are sums over
    axes, which a compiler can compute on each shard of a sharded array.
    """
    place = [jnp.zeros(shape, jnp.uint32), jnp.zeros(shape, jnp.uint32)]
    word, stride = 1, 1
    for axis in reversed(range(len(shape))):
        if stride * shape[axis] > 2**32:
            word, stride = 0, 1
        index = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        place[word] += np.uint32(stride) * index
        stride *= shape[axis]
    high, low = place
    return high, low


def _fold_in(key: jax.Array, data: Any) -> jax.Array:
    # Four words that depend on four words: fused, a chain of keys would be computed
    # four times as often at every link.
    return behind_a_branch(lambda: _encrypt(key, 0, 0, 0, data), (key, data))


def _random_bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    x = jnp.moveaxis(_encrypt(key, *positions(shape), 0, 0), -1, 0)
    if bit_width == 64:
        high, low = (x[:2] ^ x[2:]).astype(jnp.uint64)
        return high << 32 | low
    return (x[0] ^ x[1] ^ x[2] ^ x[3]).astype(f"uint{bit_width}")


def _encrypt(key: jax.Array, *counter: Any) -> jax.Array:
    """The four words of each block, along a new last axis."""
    words = jnp.broadcast_arrays(*[jnp.asarray(x).astype(jnp.uint32) for x in counter])
    return jnp.stack(threefry4x32(list(key), words), axis=-1)


def _key_from_seed(seed: jax.Array) -> jax.Array:
    high = jax.lax.shift_right_logical(seed, jnp.asarray(32, seed.dtype))
    zero = jnp.zeros((), jnp.uint32)
    key = jnp.stack([high.astype(jnp.uint32), seed.astype(jnp.uint32), zero, zero])
    return _encrypt(key, 0, 0, 0, 0)
