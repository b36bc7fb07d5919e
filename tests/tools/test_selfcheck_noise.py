"""Noise and keys that are right pass, and each kind of wrong fails."""

import dataclasses
import math
import os

import numpy as np
import pytest
from scipy import stats
from subjects import DPMP, SIZES, by_name, passed

from dpmp.tools.selfcheck._modes import unsafe_releases
from dpmp.tools.selfcheck._noise import measure_keys, measure_noise
from dpmp.tools.selfcheck._subjects import Keys, Releases

# Fine grids take more releases until numbers repeat.
MORE_RELEASES = dataclasses.replace(SIZES, num_training=2**22, num_test=2**18)


@pytest.mark.slow
@by_name(DPMP.releases)
def test_the_noise_of_dpmp_passes(subject):
    assert all(passed(measure_noise(subject, MORE_RELEASES)))


def releases(noise, *, largest=1.0):
    """A subject from a function of a generator and a number of draws."""
    rng = np.random.default_rng(0)
    return Releases(
        "broken", True, lambda has_example, num: noise(rng, num) + has_example * largest
    )


def gaussian_on_a_grid(rng, num):
    return (np.round(rng.normal(size=num) * 2**15) / 2**15).astype(np.float32)


def test_rounded_gaussian_noise_passes():
    assert all(passed(measure_noise(releases(gaussian_on_a_grid), SIZES)))


def test_float_noise_fails():
    bits, advantage, *_ = measure_noise(unsafe_releases(), SIZES)
    assert not bits.passed
    assert bits.value > 0.8
    assert not advantage.passed


def test_a_sum_beside_the_grid_of_the_noise_fails():
    subject = releases(gaussian_on_a_grid, largest=np.float32(0.99221))
    bits, advantage, *shape = measure_noise(subject, SIZES)
    assert not bits.passed
    assert not advantage.passed
    assert all(passed(shape))


def test_noise_of_twelve_bits_fails():
    quantiles = stats.norm.ppf((np.arange(2**12) + 0.5) / 2**12).astype(np.float32)
    subject = releases(lambda rng, num: rng.choice(quantiles, num))
    *_, distinct, largest, _ = measure_noise(subject, SIZES)
    assert not distinct.passed
    assert not largest.passed


@pytest.mark.parametrize("factor", [0.97, 1.05])
def test_noise_of_another_scale_fails(factor):
    subject = releases(lambda rng, num: gaussian_on_a_grid(rng, num) * factor)
    assert not measure_noise(subject, SIZES)[-1].passed


def test_noise_that_never_repeats_is_not_taken_for_safe():
    subject = releases(lambda rng, num: rng.normal(size=num))
    bits = measure_noise(subject, SIZES)[0]
    assert math.isnan(bits.value)
    assert not bits.passed


@by_name(DPMP.keys)
def test_the_key_of_dpmp_passes(subject):
    results = measure_keys(subject)
    assert passed(results) == [True, True]
    assert [x.value for x in results] == [128, 128]


def noise_of_words(words):
    return np.random.default_rng(words).normal(size=4)


def words_from_the_system(num):
    return np.frombuffer(os.urandom(4 * num), np.uint32)


@pytest.mark.parametrize("num_words", [1, 3])
def test_short_keys_fail(num_words):
    subject = Keys(
        "broken", True, lambda: words_from_the_system(num_words), noise_of_words
    )
    results = measure_keys(subject)
    assert [x.value for x in results] == [32 * num_words] * 2
    assert passed(results) == [False, False]


def test_keys_from_numpys_generator_fail_once_it_is_seeded():
    def draw():
        return np.random.randint(0, 2**32, 4, np.uint32)

    results = measure_keys(Keys("broken", True, draw, noise_of_words))
    assert [x.value for x in results] == [128, 0]
    assert passed(results) == [True, False]


def test_noise_that_ignores_half_of_its_key_fails():
    subject = Keys(
        "broken",
        True,
        lambda: words_from_the_system(4),
        lambda words: noise_of_words(words[:2]),
    )
    assert [x.value for x in measure_keys(subject)] == [64, 64]


def test_the_state_of_numpys_generator_is_restored():
    np.random.seed(7)
    expected = np.random.random(3)
    np.random.seed(7)
    measure_keys(DPMP.keys[0])
    np.testing.assert_array_equal(np.random.random(3), expected)
