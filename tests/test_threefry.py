"""Against the published vectors, and against keys and bits that jax gave."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpmp import _random
from dpmp._random import threefry4x32

PI = 0x243F6A8885A308D313198A2E03707344A4093822299F31D0082EFA98EC4E6C89

# kat_vectors of Random123: (counter, key, block), 20 rounds.
VECTORS = [
    (0, 0, 0x9C6CA96AE17EAE66FC10ECD45256A7D8),
    (2**128 - 1, 2**128 - 1, 0x2A88169657012287F6C7446EA16A6732),
    (PI >> 128, PI % 2**128, 0x59CD1DBBB887957986B5D00CAC8B6D84),
]


def _words(integer):
    return [np.uint32(integer >> shift & 0xFFFFFFFF) for shift in (96, 64, 32, 0)]


def test_published_vectors_elementwise():
    # Eager, the rounds are small programs one by one: these run as one.
    counters, keys, blocks = (
        [np.stack(words) for words in zip(*map(_words, column), strict=True)]
        for column in zip(*VECTORS, strict=True)
    )
    found = jax.jit(threefry4x32)(keys, counters)
    np.testing.assert_array_equal(np.stack(found), np.stack(blocks))


# From jax 0.10.2, with impl="threefry4x32". A jax with other keys or bits would make
# other noise from saved states.
KEYS = {
    0: 0x9C6CA96AE17EAE66FC10ECD45256A7D8,
    2**31 - 1: 0x9068011E2549AC83AB0A745E4EC79B7A,
    -1: 0x97261B492D2C567E65858E53002893F8,
}
# And from the key of seed 0:
SPLIT = [0x3B727BC42C82F60623E05D273042F27A, 0x9C2AA927E92637E1D586A456566FF344]
FOLDED_IN_12 = [0x8DA31EE5BCDC7BEDD5725ECEC40E6040]
BITS = [0x0452229F, 0xD3834D8B, 0xFCBC426C, 0xE5CD8709, 0xE5D2458C, 0x1F6BE2AD]


def test_fresh_keys_are_those_of_jax():
    impl = jax.random.key_impl(_random.fresh_key())

    def integers(keys):
        words = np.asarray(jax.random.key_data(keys)).reshape(-1, 4).astype(">u4")
        return [int.from_bytes(key.tobytes(), "big") for key in words]

    for seed, expected in KEYS.items():
        assert integers(jax.random.key(seed, impl=impl)) == [expected]
    key = jax.random.wrap_key_data(np.stack(_words(KEYS[0])), impl=impl)
    assert integers(_random.split(key, 2)) == SPLIT
    assert integers(_random.fold_in(key, 12)) == FOLDED_IN_12
    assert jax.random.bits(key, (2, 3)).ravel().tolist() == BITS


@pytest.mark.parametrize("shape", [(0,), (7,), (2, 3, 4), (1, 5, 1)])
def test_positions_are_flat_indices(shape):
    @jax.jit
    def positions():
        axes = range(len(shape))
        indices = [jax.lax.broadcasted_iota(jnp.uint32, shape, i) for i in axes]
        return _random.positions(shape, indices, jnp.uint32(1))

    high, low = positions()
    assert not np.any(high)
    np.testing.assert_array_equal(low, np.arange(np.prod(shape)).reshape(shape))


@pytest.mark.parametrize(
    ("shape", "last"),
    [
        ((2**17, 2**17), (2**17 - 1, 2**17 - 1)),
        ((2**16, 2**16), (0, 2**32 - 1)),
        ((256,) * 4, (0, 2**32 - 1)),
        ((1, 2**32), (0, 2**32 - 1)),
        ((3, 1, 2**16, 2**16), (2, 2**32 - 1)),
        ((80, 8192, 28672), (79, 8192 * 28672 - 1)),
    ],
)
def test_positions_of_a_large_array_fit_into_two_words(shape, last):
    corner = [np.uint32(size - 1) for size in shape]
    words = jax.jit(lambda i: _random.positions(shape, i, jnp.uint32(1)))(corner)
    assert tuple(map(int, words)) == last


@pytest.mark.parametrize("shape", [(2**32 + 1,), (3, 2**31 - 1, 3)])
def test_positions_that_two_words_cannot_number_are_refused(shape):
    with pytest.raises(ValueError, match="two words of 32 bits"):
        _random.positions(shape, [jnp.uint32(0)] * len(shape), jnp.uint32(1))
