"""Draws the size of a batch and its members, with integers only.

*The size* of a Poisson batch is a binomial number. The ratio of two neighbouring
probabilities is a fraction of integers. So a table starts with the weight 2^256 of the
most likely size, multiplies it by one ratio after the other in both directions, and
rounds each product down. It stops where a weight is zero. A uniform number of 384 bits
chooses among the weights.

*The members* are a uniformly distributed subset of this size. Words are drawn until
enough different numbers have come up. Every word that is used is uniformly distributed
over the n numbers: words above the largest multiple of n are dropped, and the others
are reduced modulo n. Each round draws only as many words as numbers are missing, so
there are never too many.

docs/proofs.md shows that both are right. In all functions, `draw_words(k)` returns the
next k uniform uint64 words.
"""

import bisect
import functools
import itertools
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import numpy as np

from dpmp import _validate
from dpmp._validate import as_number

# A bound on the total variation distance of one draw.
SAMPLING_TOTAL_VARIATION = 2.0**-180

_MODE_WEIGHT = 2**256
_WORDS_PER_DRAW = 6

# For subsets of at least this fraction of all numbers, marking is faster than sorting.
_DENSE = 1 / 32


def draw_binomial(
    num_trials: int, prob: Fraction, draw_words: Callable[[int], np.ndarray]
) -> int:
    """Draws the number of successes in less than 2^63 trials."""
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


def draw_subset(
    num_elements: int, size: int, draw_words: Callable[[int], np.ndarray]
) -> np.ndarray:
    """Draws `size` of the numbers below `num_elements` < 2^63, as ascending int64."""
    last_word = last_fair_word(num_elements)

    def draw_numbers(num_words: int) -> np.ndarray:
        words = draw_words(num_words)
        words = words[words <= last_word]
        return (words % np.uint64(num_elements)).astype(np.int64)

    if size < _DENSE * num_elements:
        return _by_sorting(size, draw_numbers)
    if 2 * size <= num_elements:
        return np.flatnonzero(_by_marking(num_elements, size, draw_numbers))
    left_out = _by_marking(num_elements, num_elements - size, draw_numbers)
    return np.flatnonzero(~left_out)


def last_fair_word(number: int) -> np.uint64:
    """The last word below the largest multiple of a number."""
    return np.uint64(2**64 - 1 - 2**64 % number)


def _by_sorting(size: int, draw_numbers: Callable[[int], np.ndarray]) -> np.ndarray:
    members = np.zeros(0, np.int64)
    while len(members) < size:
        new = draw_numbers(size - len(members))
        # A stable sort is fast where most numbers are in order already.
        members = np.sort(np.concatenate([members, new]), kind="stable")
        is_first = np.ones(len(members), bool)
        is_first[1:] = members[1:] != members[:-1]
        members = members[is_first]
    return members


def _by_marking(
    num_elements: int, size: int, draw_numbers: Callable[[int], np.ndarray]
) -> np.ndarray:
    is_member = np.zeros(num_elements, bool)
    while missing := size - int(np.count_nonzero(is_member)):
        is_member[draw_numbers(missing)] = True
    return is_member


def key_of(key: Any) -> int:
    """Returns a key as a Python integer; the error for others does not show them."""
    key = as_number(key)
    if not (_validate.is_integer(key) and 0 <= key < 2**128):
        _validate.fail(
            "key must be an integer from 0 to 2^128 - 1. Use secrets.randbits(128), "
            "and keep it secret.",
            key_type=type(key).__name__,
        )
    return key


def random_words(key: int, step: int, stream: int = 0) -> Callable[[int], np.ndarray]:
    """Returns a function that draws words from a random stream of one step."""
    counter = np.array([0, 0, stream, step], np.uint64)
    key_words = np.array([key % 2**64, key // 2**64], np.uint64)
    return np.random.Philox(counter=counter, key=key_words).random_raw
