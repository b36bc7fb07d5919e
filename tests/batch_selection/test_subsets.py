"""All subsets of one size are equally likely: exactly, by enumeration."""

import collections
import itertools
import math

import numpy as np
import pytest

from dpmp.batch_selection import _draws
from dpmp.batch_selection._draws import draw_subset


class NoWordsLeftError(Exception):
    pass


def words_from(words):
    """A `draw_words` that gives these words, one after the other."""
    words = list(words)

    def draw_words(size):
        if size > len(words):
            raise NoWordsLeftError
        taken = [words.pop(0) for _ in range(size)]
        return np.array(taken, np.uint64)

    return draw_words


def philox(seed):
    return np.random.Philox(seed).random_raw


SORTING, MARKING = 2.0, 0.0  # the fraction of all numbers from which on are marked


# Subsets of more than half of the numbers are drawn by marking their complement.
@pytest.mark.parametrize(
    ("dense", "num_elements", "size"),
    [
        *[(SORTING, *x) for x in [(5, 1), (5, 2), (4, 2)]],
        *[(MARKING, *x) for x in [(5, 1), (5, 2), (4, 2), (4, 3)]],
    ],
)
def test_all_subsets_are_exactly_equally_likely(dense, num_elements, size, monkeypatch):
    monkeypatch.setattr(_draws, "_DENSE", dense)
    counts = collections.Counter()
    # Each number comes up for equally many words, so these stand for all words.
    for words in itertools.product(range(num_elements), repeat=6):
        try:
            subset = draw_subset(num_elements, size, words_from(words))
        except NoWordsLeftError:  # which has the same probability for all subsets
            continue
        counts[tuple(subset)] += 1
    assert len(counts) == math.comb(num_elements, size)
    assert len(set(counts.values())) == 1


@pytest.mark.parametrize("num_elements", [1, 2, 3, 2**32, 3 * 2**61, 2**63 - 1])
def test_words_beyond_the_last_multiple_are_dropped(num_elements, monkeypatch):
    monkeypatch.setattr(_draws, "_DENSE", SORTING)
    end = 2**64 // num_elements * num_elements
    beyond = [end, 2**64 - 1] if end < 2**64 else []
    (index,) = draw_subset(num_elements, 1, words_from([*beyond, end - 1]))
    assert index == num_elements - 1


@pytest.mark.parametrize("size", [0, 1, 3, 200, 499])
def test_sorting_and_marking_give_the_same_subset(size, monkeypatch):
    subsets = []
    for dense in (SORTING, MARKING):
        monkeypatch.setattr(_draws, "_DENSE", dense)
        subsets.append(draw_subset(1000, size, philox(5)))
    np.testing.assert_array_equal(*subsets)


@pytest.mark.parametrize("size", [0, 1, 30, 31, 32, 500, 501, 999, 1000])
def test_a_subset_has_its_size_and_is_ascending(size):
    subset = draw_subset(1000, size, philox(size))
    assert subset.dtype == np.int64
    assert len(subset) == size
    assert np.all(np.diff(subset) > 0)
    assert np.all((subset >= 0) & (subset < 1000))
