"""Random keys of 128 bits, and the bits that Threefry-4x32 makes from them.

References:
  [Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3, section
  3](https://doi.org/10.1145/2063384.2063405)
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from dpmp import _processes, _validate
from dpmp._fence import materialize

_NUM_ROUNDS = 20
_LEFT_ROTATIONS = (10, 11, 13, 23, 6, 17, 25, 18)
_RIGHT_ROTATIONS = (26, 21, 27, 5, 20, 11, 10, 20)
_KEY_PARITY = np.uint32(0x1BD11BDA)


def fresh_key() -> jax.Array:
    """Draws a new 128-bit key from the operating system, the same on all processes."""
    # Under a transformation that traces, any new array is traced. There the key would
    # be a constant of the program, every run of which would repeat the same noise.
    if isinstance(jnp.zeros(()), jax.core.Tracer):
        _validate.fail(
            "a key from the system must be drawn outside of jax.jit and other "
            "transformations. Call init outside of the function, or pass prng_key.",
            traced=True,
        )
    words = np.frombuffer(os.urandom(16), np.uint32)
    words = jnp.asarray(_processes.broadcast(words))
    return jax.random.wrap_key_data(words, impl="threefry4x32")


def check_key(prng_key: Any) -> None:
    """Raises ValueError unless `prng_key` is one new-style jax key."""
    is_key = isinstance(prng_key, jax.Array) and jnp.issubdtype(
        prng_key.dtype, jax.dtypes.prng_key
    )
    if not is_key or prng_key.shape != ():
        _validate.fail(
            "prng_key must be one key made by jax.random.key. Leave it out to draw "
            "128 bits from the system. Integers are refused, because the noise is "
            "only as hard to guess as its key.",
            # The key itself is secret and must not appear in the message.
            prng_key=str(jax.typeof(prng_key)) if is_key else type(prng_key).__name__,
        )


def check_model_key(what: str, key: Any) -> None:
    """Raises ValueError unless `key` is one jax key, new-style or old-style."""
    is_array = isinstance(key, jax.Array)
    is_new = is_array and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    is_old = is_array and key.dtype == jnp.uint32 and key.ndim == 1
    if not is_old and (not is_new or key.shape != ()):
        _validate.fail(
            f"{what} must be one key of jax. Use jax.random.key(0), for example.",
            given=str(jax.typeof(key)) if is_array else type(key).__name__,
        )


def fold_in(prng_key: jax.Array, data: Any) -> jax.Array:
    """Computes `jax.random.fold_in` once."""
    return _in_memory(lambda: jax.random.fold_in(prng_key, data), prng_key)


def split(prng_key: jax.Array, num: int) -> jax.Array:
    """Computes `jax.random.split` once."""
    return _in_memory(lambda: jax.random.split(prng_key, num), prng_key)


def _in_memory(derive: Callable[[], jax.Array], prng_key: jax.Array) -> jax.Array:
    """Derives keys and stores them: each link of a chain would multiply the work."""
    words = materialize(
        lambda: jax.random.key_data(derive()), jax.random.key_data(prng_key)
    )
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(prng_key))


def key_words(prng_key: jax.Array) -> jax.Array:
    """The (4,) uint32 words of a key; a shorter key is padded with zeros."""
    words = jax.random.key_data(prng_key)
    return jnp.zeros(4, jnp.uint32).at[: words.size].set(words)


def positions(
    shape: tuple[int, ...], indices: Sequence[jax.Array], one: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Two uint32 arrays (high, low) that number entries of an array.

    No two entries have the same pair. `low` is the flat index if that fits into 32
    bits. Otherwise it is the index within as many of the last axes as fit, and `high`
    is the index within the other axes. Both are sums over axes, so that a compiler can
    compute them on each shard. Raises ValueError if either does not fit into 32 bits.

    Args:
      shape: the shape of the array.
      indices: for each axis, the index of every entry to number, uint32; broadcast.
      one: the number 1, uint32. A loop passes a 1 that the compiler cannot fold: then
        positions are computed in each pass, and not stored before the loop.
    """
    words, word, stride = [jnp.zeros((), jnp.uint32)] * 2, 1, 1
    for size, index in reversed(list(zip(shape, indices, strict=True))):
        if stride * size > 2**32:
            if not (word == 1 and size <= 2**32):
                _validate.fail(
                    "the entries of an array must be numbered by two words of 32 "
                    "bits. Divide it into several arrays.",
                    shape=shape,
                )
            word, stride = 0, 1
        if size > 1:
            words[word] += np.uint32(stride) * one * index
        stride *= size
    numbered = jnp.broadcast_shapes(*(x.shape for x in indices))
    return jnp.broadcast_to(words[0], numbered), jnp.broadcast_to(words[1], numbered)


def threefry4x32(key: Sequence[Any], counter: Sequence[Any]) -> list[Any]:
    """Encrypts four uint32 arrays with four others, elementwise in constant time."""
    schedule = [*key, key[0] ^ key[1] ^ key[2] ^ key[3] ^ _KEY_PARITY]
    x = [word + k for word, k in zip(counter, schedule[:4], strict=True)]
    for i in range(_NUM_ROUNDS):
        left, right = _LEFT_ROTATIONS[i % 8], _RIGHT_ROTATIONS[i % 8]
        first, second = (1, 3) if i % 2 == 0 else (3, 1)
        x[0] = x[0] + x[first]
        x[first] = _rotate(x[first], left) ^ x[0]
        x[2] = x[2] + x[second]
        x[second] = _rotate(x[second], right) ^ x[2]
        if i % 4 == 3:
            injection = i // 4 + 1
            x = [word + schedule[(injection + j) % 5] for j, word in enumerate(x)]
            x[3] = x[3] + np.uint32(injection)
    return x


def _rotate(x: jax.Array, distance: int) -> jax.Array:
    return x << np.uint32(distance) | x >> np.uint32(32 - distance)
