"""The secret keys of a run: one for each use of random numbers."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpmp import _random
from dpmp.training._fingerprint import with_other_key
from dpmp.training._state import TrainingState


class RunKeys(NamedTuple):
    """All keys of a run, derived from one root key.

    Attributes:
      noise: of the noise.
      sampling: (4,) uint32, of the batches.
      model: of the randomness in the loss.
      update: of stochastic rounding.
    """

    noise: jax.Array
    sampling: jax.Array
    model: jax.Array
    update: jax.Array

    @classmethod
    def from_root(cls, prng_key: jax.Array | None) -> "RunKeys":
        """Derives the keys; None draws a root key from the operating system."""
        if prng_key is None:
            prng_key = _random.fresh_key()
        _random.check_key(prng_key)
        _random.check_shared(prng_key)
        noise, sampling, model, update = jax.random.split(prng_key, 4)
        return cls(
            noise=noise,
            sampling=jax.random.bits(sampling, (4,), jnp.uint32),
            # This generator, the default of jax, compiles in every loss.
            model=jax.random.wrap_key_data(
                jax.random.bits(model, (2,), jnp.uint32), impl="threefry2x32"
            ),
            update=update,
        )


def with_fresh_keys(state: TrainingState) -> TrainingState:
    """The same state, with keys that no step has used before."""
    keys, noise_state = RunKeys.from_root(None), state.noise_state
    hashes = with_other_key(state.fingerprint, state.sampling_key, keys.sampling)
    return state._replace(
        noise_state=noise_state._replace(
            prng_key=_placed_like(noise_state.prng_key, keys.noise)
        ),
        sampling_key=_placed_like(state.sampling_key, keys.sampling),
        model_key=_placed_like(state.model_key, keys.model),
        update_key=None
        if state.update_key is None
        else _placed_like(state.update_key, keys.update),
        fingerprint=_placed_like(state.fingerprint, hashes),
    )


def _placed_like(old: Any, new: jax.Array) -> jax.Array:
    return jax.device_put(new, old.sharding) if old.committed else new
