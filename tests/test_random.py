import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpmp import _random


def test_every_bit_of_a_fresh_key_is_random():
    words = np.array([jax.random.key_data(_random.fresh_key()) for _ in range(200)])
    assert words.dtype == np.uint32
    assert len(np.unique(words)) == words.size
    bits = np.unpackbits(words.view(np.uint8), axis=1)
    assert bits.shape == (200, 128)
    # A fair coin is this far off with a probability of 1e-10 for each bit.
    assert np.all(np.abs(bits.mean(0) - 0.5) < 0.23)


def test_fresh_keys_do_not_come_from_a_global_generator():
    np.random.seed(0)
    first = jax.random.key_data(_random.fresh_key())
    np.random.seed(0)
    assert np.any(first != jax.random.key_data(_random.fresh_key()))


def test_keys_that_are_refused_are_not_shown():
    keys = jax.random.wrap_key_data(jnp.full((3, 2), 123456789, jnp.uint32))
    with pytest.raises(ValueError, match=r"got prng_key='key<fry>\[3\]'") as error:
        _random.check_key(keys)
    assert "123456789" not in str(error.value)
