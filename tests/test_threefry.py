"""Against the published vectors, and against jax's own generator where it has one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpmp import _random
from dpmp._threefry import threefry4x32

PI = 0x243F6A8885A308D313198A2E03707344A4093822299F31D0082EFA98EC4E6C89

# kat_vectors of Random123: (counter, key, block), 20 rounds.
VECTORS = [
    (0, 0, 0x9C6CA96AE17EAE66FC10ECD45256A7D8),
    (2**128 - 1, 2**128 - 1, 0x2A88169657012287F6C7446EA16A6732),
    (PI >> 128, PI % 2**128, 0x59CD1DBBB887957986B5D00CAC8B6D84),
]


def _words(integer):
    return [jnp.uint32(integer >> shift & 0xFFFFFFFF) for shift in (96, 64, 32, 0)]


@pytest.mark.parametrize(("counter", "key", "block"), VECTORS)
def test_published_vectors(counter, key, block):
    assert threefry4x32(_words(key), _words(counter)) == _words(block)


def test_it_is_elementwise():
    counters = [jnp.arange(5, dtype=jnp.uint32) + 10 * i for i in range(4)]
    key = _words(PI % 2**128)
    blocks = jnp.stack(threefry4x32(key, counters))
    for i in range(5):
        one = threefry4x32(key, [x[i] for x in counters])
        np.testing.assert_array_equal(blocks[:, i], jnp.stack(one))


@pytest.fixture(scope="module")
def keys():
    """One key of jax's implementation and one of ours, with the same words."""
    try:
        theirs = jax.random.key(0, impl="threefry4x32")
    except ValueError:
        pytest.skip("this jax has no threefry4x32")
    ours = _random.define_key_impl("threefry4x32_for_tests")
    return theirs, jax.random.wrap_key_data(jax.random.key_data(theirs), impl=ours)


@pytest.mark.parametrize(
    "draw",
    [
        lambda key: jax.random.bits(key, (3, 5)),
        lambda key: jax.random.bits(key, (7,), jnp.uint8),
        lambda key: jax.random.normal(key, (6,)),
        lambda key: jax.random.key_data(jax.random.split(key, (2, 3))),
        lambda key: jax.random.key_data(jax.random.fold_in(key, 12)),
        lambda key: jax.jit(jax.random.permutation, static_argnums=1)(key, 9),
    ],
)
def test_keys_for_older_jax_give_the_same_bits(keys, draw):
    theirs, ours = map(draw, keys)
    np.testing.assert_array_equal(theirs, ours)


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1, -1])
def test_keys_for_older_jax_come_from_the_same_seeds(keys, seed):
    theirs = jax.random.key(seed, impl="threefry4x32")
    ours = jax.random.key(seed, impl=jax.random.key_impl(keys[1]))
    np.testing.assert_array_equal(
        jax.random.key_data(theirs), jax.random.key_data(ours)
    )


def test_wide_bits_are_the_same(keys):
    with jax.enable_x64():
        theirs, ours = (jax.random.bits(key, (4,), jnp.uint64) for key in keys)
    np.testing.assert_array_equal(theirs, ours)


@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 3, 4)])
def test_positions_are_flat_indices(shape):
    high, low = _random.positions(shape)
    assert not np.any(high)
    np.testing.assert_array_equal(
        low, np.arange(np.prod(shape, dtype=int)).reshape(shape)
    )


def test_positions_of_an_array_too_large_for_32_bits_differ():
    shape = (2**17, 2**17)
    rows, columns = jax.eval_shape(lambda: _random.positions(shape))
    assert rows.shape == columns.shape == shape

    @jax.jit
    def corner():
        return [x[-1, -1] for x in _random.positions(shape)]

    assert corner() == [2**17 - 1, 2**17 - 1]
