"""Draws the size of a Poisson batch, a binomial number, with integers only.

The probability p(k) that k of n examples are in a batch is largest at the *mode*. Let
w(k) = 2^256 p(k) / p(mode). The ratio of two neighbouring p(k) is a fraction of
integers. So the table starts with the weight W(mode) = 2^256, multiplies it by one
ratio after the other in both directions, and rounds each product down to an integer. It
stops where a weight is zero. A count is then drawn with a probability proportional to
its weight. A uniform number of 384 bits selects the count.
docs/proofs.md bounds the distance from the binomial distribution.
"""

import bisect
import functools
import itertools
from collections.abc import Callable, Iterable
from fractions import Fraction

import numpy as np

# A bound on the total variation distance of one draw.
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
