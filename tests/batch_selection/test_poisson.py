import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from dpmp.batch_selection import PoissonSampling, pad_indices

KEY = 0x0123456789ABCDEF_FEDCBA9876543210
# With fixed keys nothing flakes; this is for the day on which a key changes.
SMALLEST_P_VALUE = 1e-6


def membership(sampling, num_examples, key=KEY):
    """(iterations, num_examples) bool: who is in which batch."""
    is_member = np.zeros((sampling.iterations, num_examples), bool)
    for step in range(sampling.iterations):
        is_member[step, sampling.indices(step, num_examples=num_examples, key=key)] = 1
    return is_member


def expected_batch(sampling_prob, size, key, step):
    """A batch of at most half of `size` examples, with exact probabilities."""
    key_words = np.array([key % 2**64, key >> 64], np.uint64)
    philox = np.random.Philox(
        counter=np.array([0, 0, 0, step], np.uint64), key=key_words
    )
    words = philox.random_raw(6 + 2 * size).tolist()
    uniform = sum(word << 64 * i for i, word in enumerate(words[:6]))
    prob, count, below = Fraction(sampling_prob), -1, 0
    while below <= Fraction(uniform, 2**384):
        count += 1
        ways = math.comb(size, count)
        below += ways * prob**count * (1 - prob) ** (size - count)
    batch, words = set(), iter(words[6:])
    while len(batch) < count:
        batch.add(next(words) % size)
    assert 2 * count <= size
    return sorted(batch)


@pytest.mark.parametrize("step", [0, 1, 10**9])
@pytest.mark.parametrize("key", [0, 7, KEY, 2**128 - 1])
def test_batches_are_those_of_philox_and_exact_probabilities(key, step):
    sampling = PoissonSampling(0.25, 10**9 + 1)
    np.testing.assert_array_equal(
        sampling.indices(step, num_examples=50, key=key),
        expected_batch(0.25, 50, key, step),
    )


@pytest.mark.parametrize(("sampling_prob", "steps"), [(0.3, 20_000), (0.8, 5000)])
def test_every_batch_has_the_probability_of_independent_inclusion(sampling_prob, steps):
    num_examples = 4
    is_member = membership(PoissonSampling(sampling_prob, steps), num_examples)
    observed = np.bincount(is_member @ (1 << np.arange(num_examples)), minlength=16)

    def p_value(prob):
        sizes = np.array([batch.bit_count() for batch in range(16)])
        expected = steps * prob**sizes * (1 - prob) ** (num_examples - sizes)
        statistic = np.sum((observed - expected) ** 2 / expected)
        return stats.chi2.sf(statistic, 15)

    assert p_value(sampling_prob) > SMALLEST_P_VALUE
    assert p_value(0.95 * sampling_prob) < SMALLEST_P_VALUE


@pytest.mark.parametrize("num_examples", [10**9, 2**63 - 1])
def test_memory_follows_the_size_of_the_batch(num_examples):
    sampling = PoissonSampling(1000 / num_examples, 1)
    tracemalloc.start()
    try:
        indices = sampling.indices(0, num_examples=num_examples, key=KEY)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 800 < len(indices) < 1200
    assert np.all(np.diff(indices) > 0)
    assert 0 <= indices[0] < 0.9 * num_examples < indices[-1] < num_examples
    assert peak < 10**6


@pytest.mark.parametrize(
    ("sampling_prob", "expected"), [(1.0, 1), (2.0**-64, 0), (1e-30, 0), (5e-324, 0)]
)
def test_certain_and_tiny_probabilities_give_full_and_empty_batches(
    sampling_prob, expected
):
    assert np.all(membership(PoissonSampling(sampling_prob, 3), 10_000) == expected)


def test_no_batch_is_larger_than_the_truncated_size():
    whole, truncated = PoissonSampling(0.5, 500), PoissonSampling(0.5, 500, 10)
    before, after = membership(whole, 20), membership(truncated, 20)
    np.testing.assert_array_equal(after.sum(1), np.minimum(before.sum(1), 10))
    assert 100 < np.sum(before.sum(1) > 10) < 400


def test_truncation_keeps_a_uniformly_random_part():
    steps, size, num_examples = 5000, 3, 12
    is_member = membership(PoissonSampling(1.0, steps, size), num_examples)
    counts = is_member.sum(0)
    # Counts of draws without replacement: their covariance is this variance times
    # the projection orthogonal to the constant, up to n / (n - 1).
    kept = size / num_examples
    variance = steps * kept * (1 - kept) * num_examples / (num_examples - 1)
    statistic = np.sum((counts - steps * kept) ** 2) / variance
    assert stats.chi2.sf(statistic, num_examples - 1) > SMALLEST_P_VALUE


def test_the_iterator_gives_the_same_batches_and_draws_its_key_from_a_generator():
    sampling = PoissonSampling(0.3, 5, 10)

    def batches(rng, **start):
        return [x.tolist() for x in sampling.batch_iterator(50, rng, **start)]

    whole = batches(KEY)
    assert whole == [
        sampling.indices(step, num_examples=50, key=KEY).tolist() for step in range(5)
    ]
    assert batches(KEY, start=3) == whole[3:]
    assert batches(KEY, start=5) == []
    for start in (-3, 1.5, 6):
        with pytest.raises(ValueError, match="start must be from 0 to iterations = 5"):
            batches(KEY, start=start)
    first, again = (batches(np.random.default_rng(0)) for _ in range(2))
    assert first == again
    rng = np.random.default_rng(0)
    assert batches(rng) != batches(rng)
    assert batches(None) != batches(None)


def test_a_key_from_the_system_has_128_bits(monkeypatch):
    keys = []
    monkeypatch.setattr(
        PoissonSampling, "indices", lambda *_, key, **__: keys.append(key)
    )
    for _ in range(200):
        list(PoissonSampling(0.5, 1).batch_iterator(5))
    assert len(set(keys)) == 200
    assert 2**120 <= max(keys) < 2**128


def test_padding_is_marked_by_minus_one_and_a_refusal_tells_no_size():
    padded = pad_indices(np.array([3, 8]), 4)
    assert padded.dtype == np.int64
    np.testing.assert_array_equal(padded, [3, 8, -1, -1])
    np.testing.assert_array_equal(pad_indices(np.zeros(0, np.int64), 2), [-1, -1])
    with pytest.raises(ValueError, match="got batch_size=4") as caught:
        pad_indices(np.arange(5), 4)
    assert "5" not in str(caught.value)
