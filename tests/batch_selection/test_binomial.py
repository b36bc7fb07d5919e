"""The table of weights against exact probabilities, and draws against the table.

test_poisson.py counts the batches that are drawn.
"""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from dpmp.batch_selection import _draws
from dpmp.batch_selection._draws import draw_binomial

BITS = 384  # of one draw


def exact_probabilities(num_trials, prob):
    """Fractions: the probabilities of 0, ..., num_trials."""
    return [
        math.comb(num_trials, k) * prob**k * (1 - prob) ** (num_trials - k)
        for k in range(num_trials + 1)
    ]


def table_probabilities(num_trials, prob):
    """The first count of the table, and the probabilities of its counts."""
    least, cumulative = _draws._table(num_trials, prob)
    weights = np.diff(np.array([0, *cumulative], object))
    return least, [Fraction(x, cumulative[-1]) for x in weights]


def words_of(uniform):
    """A `draw_words` that gives this number of 384 bits, and nothing more."""

    def draw_words(size):
        assert size == BITS // 64
        return np.array([uniform >> 64 * i & 2**64 - 1 for i in range(size)], np.uint64)

    return draw_words


@pytest.mark.parametrize(
    ("num_trials", "prob"),
    [(7, 5e-324), *itertools.product([1, 2, 90], [2.0**-64, 0.01, 0.5, 0.93, 1.0])],
)
def test_the_table_is_as_near_to_the_exact_probabilities_as_proved(num_trials, prob):
    prob = Fraction(prob)
    least, actual = table_probabilities(num_trials, prob)
    counts = range(num_trials + 1)
    padded = dict(zip(range(least, least + len(actual)), actual, strict=True))
    distance = sum(
        abs(padded.get(k, 0) - p)
        for k, p in zip(counts, exact_probabilities(num_trials, prob), strict=True)
    )
    assert set(padded) <= set(counts)
    assert distance / 2 <= 6 * Fraction(num_trials + 1) ** 2 / 2**256
    assert distance / 2 <= _draws.SAMPLING_TOTAL_VARIATION


@pytest.mark.parametrize(
    ("num_trials", "prob"),
    [(10**6, 0.5), (10**8, 1e-4), (10**9, 1e-6), (10**9, 1e-9), (10**7, 0.999)],
)
def test_the_table_of_a_large_dataset_holds_the_binomial_distribution(num_trials, prob):
    least, actual = table_probabilities(num_trials, Fraction(prob))
    counts = np.arange(least, least + len(actual))
    expected = stats.binom(num_trials, prob).pmf(counts)
    # scipy's own error is about 1e-16 of the logarithm's largest term, n log n.
    np.testing.assert_allclose(np.array(actual, float), expected, rtol=2e-5, atol=1e-70)
    np.testing.assert_allclose(
        float(sum(k * p for k, p in zip(counts.tolist(), actual, strict=True))),
        num_trials * prob,
        rtol=1e-15,
    )


def test_the_proof_covers_the_widest_table():
    # R of docs/proofs.md: Hoeffding's inequality puts its tail below the last weight.
    num_trials = 2**63 - 1
    log_weight = 256 * math.log(2) + math.log(num_trials + 1)
    width = 2 + math.isqrt(math.ceil(num_trials * log_weight / 2))
    assert width < 2**35
    assert 6 * width**2 < 2 ** (256 - 183)
    assert _draws.SAMPLING_TOTAL_VARIATION >= 2.0**-183 + 2.0**-348


@pytest.mark.parametrize(("num_trials", "prob"), [(5, 0.25), (1000, 0.03), (9, 1.0)])
def test_a_draw_is_the_quantile_of_its_random_bits(num_trials, prob):
    prob = Fraction(prob)
    least, cumulative = _draws._table(num_trials, prob)
    for i, end in enumerate(cumulative):
        first_beyond = -(-(end << BITS) // cumulative[-1])
        last_within = words_of(first_beyond - 1)
        assert draw_binomial(num_trials, prob, last_within) == least + i
        if first_beyond < 2**BITS:
            beyond = words_of(first_beyond)
            assert draw_binomial(num_trials, prob, beyond) == least + i + 1
    assert draw_binomial(num_trials, prob, words_of(0)) == least
