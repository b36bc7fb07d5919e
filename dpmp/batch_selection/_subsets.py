"""Draws a uniformly distributed subset of a given size, in time linear in this size.

Words are drawn until enough different numbers have come up. Every word that is used is
uniformly distributed over the n numbers: words above the largest multiple of n are
dropped, and the others are reduced modulo n. Each round draws only as many words as
numbers are missing, so there are never too many.

The words are independent, so renaming the numbers by a permutation does not change the
distribution of the result. Hence all subsets of the given size are equally likely, with
no error at all. The same holds for their complements.
"""

from collections.abc import Callable

import numpy as np

# For subsets of at least this fraction of all numbers, marking is faster than sorting.
_DENSE = 1 / 32


def draw_subset(
    num_elements: int, size: int, draw_words: Callable[[int], np.ndarray]
) -> np.ndarray:
    """Draws `size` of the numbers below `num_elements` < 2^63, as ascending int64.

    `draw_words(k)` returns the next k uniform uint64 words.
    """
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
