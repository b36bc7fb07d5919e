"""Keys with 128 bits of entropy from the operating system."""

import os
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from dpmp import _validate

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
    return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry4x32")


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
        prng_key=prng_key if is_key else type(prng_key).__name__,
        fix="Leave it out to draw 128 bits from the system; integers are refused "
        "because the noise is only as hard to guess as its key.",
    )
