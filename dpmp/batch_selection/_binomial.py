"""Draws the size of a Poisson batch, a binomial number, with integers only.

The probability p(k) that k of n examples are in a batch is largest at the *mode*. Let
w(k) = 2^256 p(k) / p(mode). The ratio of two neighbouring p(k) is a fraction of
integers. So the table starts with the weight W(mode) = 2^256, multiplies it by one
ratio after the other in both directions, and rounds each product down to an integer. It
stops where a weight is zero. A count is then drawn with a probability proportional to
its weight.

*Total variation.* Outwards from the mode, all ratios are at most 1. So each of them
shrinks the error of the weight before it, and rounding adds less than 1: at a distance
of j from the mode, w - j <= W <= w. Let K be the distance of the first weight of zero
on one side, so that w <= K there. The errors of the weights before it add up to less
than K^2. The ratios decrease outwards, and K of them have a product of at most
K / 2^256. So the ratios beyond are at most (K / 2^256)^(1/K), which is less than
1 - 1 / 2K for K < 2^64, and the probabilities there add up to at most 2 K^2 in units of
w. The sum of all w is at least 2^256, and the sum of all W is less by under 6 K^2.
Since no W exceeds its w, this bounds the total variation distance by 6 K^2 / 2^256.

By Hoeffding's inequality, the probability of being j + 1 above or below the mode is at
most exp(-2 j^2 / n). The last weight that is not zero stands for a probability of at
least 2^-256 / (n + 1). So (K - 2)^2 <= n ln(2^256 (n + 1)) / 2, and K < 2^35 for
n < 2^63. The distance is less than 2^-183.

The uniform number that selects a count has 384 bits, and there are less than 2^36
counts. This adds less than 2^-348.
"""

import bisect
import functools
import itertools
from collections.abc import Callable, Iterable
from fractions import Fraction

import numpy as np

# A bound on the total variation distance of one draw, by the text above.
SAMPLING_TOTAL_VARIATION = 2.0**-180

_MODE_WEIGHT = 2**256
_WORDS_PER_DRAW = 6


def draw_binomial(
    num_trials: int, prob: Fraction, draw_words: Callable[[int], np.ndarray]
) -> int:
    """Draws the number of successes in less than 2^63 trials from 384 random bits.

    `draw_words(k)` returns the next k uniform uint64 words.
    """
    least, cumulative = _table(num_trials, prob)
    words = draw_words(_WORDS_PER_DRAW).astype("<u8")
    uniform = int.from_bytes(words.tobytes(), "little")
    place = uniform * cumulative[-1] >> 64 * _WORDS_PER_DRAW
    return least + bisect.bisect_right(cumulative, place)


@functools.lru_cache(maxsize=8)
def _table(num_trials: int, prob: Fraction) -> tuple[int, list[int]]:
    """The least count in the table, and the sums of the weights up to each count."""
    n, yes, no = num_trials, prob.numerator, prob.denominator - prob.numerator
    mode = min(n, (n + 1) * yes // prob.denominator)
    above = _weights(((n - k) * yes, (k + 1) * no) for k in range(mode, n))
    below = _weights((k * no, (n - k + 1) * yes) for k in range(mode, 0, -1))
    weights = [*reversed(below), _MODE_WEIGHT, *above]
    return mode - len(below), list(itertools.accumulate(weights))


def _weights(ratios: Iterable[tuple[int, int]]) -> list[int]:
    """Multiplies the weight of the mode by ratios of integers, until it vanishes."""
    weights, weight = [], _MODE_WEIGHT
    for numerator, denominator in ratios:
        weight = weight * numerator // denominator
        if weight == 0:
            break
        weights.append(weight)
    return weights
