"""All subsets of one size are equally likely: exactly, by enumeration."""

import collections
import itertools
import math
import tracemalloc

import numpy as np
import pytest
from scipy import stats

from dpmp.batch_selection import _subsets
from dpmp.batch_selection._subsets import draw_subset

# With a fixed key nothing flakes; this is for the day on which the key changes.
SMALLEST_P_VALUE = 1e-6


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


@pytest.fixture(params=["sorting", "marking"])
def way(request, monkeypatch):
    monkeypatch.setattr(_subsets, "_DENSE", 2.0 if request.param == "sorting" else 0.0)
    return request.param


# Subsets of more than half of the numbers are drawn by marking their complement.
@pytest.mark.parametrize(
    ("way", "num_elements", "size"),
    [
        *[("sorting", *x) for x in [(5, 1), (5, 2), (4, 2)]],
        *[("marking", *x) for x in [(5, 1), (5, 2), (4, 2), (4, 3)]],
    ],
    indirect=["way"],
)
def test_all_subsets_are_exactly_equally_likely(way, num_elements, size):
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


def test_words_beyond_the_last_multiple_are_dropped(way):
    num_elements = 3 * 2**61  # two multiples fit into 2^64
    if way == "marking":
        num_elements, beyond = 3, [2**64 - 1]
    else:
        beyond = [2 * num_elements, 2**64 - 1]
    draw_words = words_from([*beyond, 2**64 - 2 if way == "marking" else 7])
    expected = (2**64 - 2) % 3 if way == "marking" else 7
    assert draw_subset(num_elements, 1, draw_words).tolist() == [expected]


@pytest.mark.parametrize("num_elements", [1, 2, 2**32, 2**63 - 1])
def test_the_last_word_of_a_multiple_is_kept(num_elements, monkeypatch):
    monkeypatch.setattr(_subsets, "_DENSE", 2.0)
    last = 2**64 // num_elements * num_elements - 1
    (index,) = draw_subset(num_elements, 1, words_from([last]))
    assert index == num_elements - 1


@pytest.mark.parametrize("size", [0, 1, 3, 200, 499])
def test_sorting_and_marking_give_the_same_subset(size, monkeypatch):
    subsets = []
    for dense in (0.0, 2.0):
        monkeypatch.setattr(_subsets, "_DENSE", dense)
        subsets.append(draw_subset(1000, size, philox(5)))
    np.testing.assert_array_equal(*subsets)


@pytest.mark.parametrize("size", [0, 1, 30, 31, 32, 500, 501, 999, 1000])
def test_a_subset_has_its_size_and_is_ascending(size):
    subset = draw_subset(1000, size, philox(size))
    assert subset.dtype == np.int64
    assert len(subset) == size
    assert np.all(np.diff(subset) > 0)
    assert np.all((subset >= 0) & (subset < 1000))


@pytest.mark.parametrize("num_elements", [10**9, 2**63 - 1])
def test_members_are_spread_over_all_numbers(num_elements):
    subset = draw_subset(num_elements, 20_000, philox(1)) / num_elements
    assert stats.kstest(subset, "uniform").pvalue > SMALLEST_P_VALUE
    assert stats.kstest(0.95 * subset, "uniform").pvalue < SMALLEST_P_VALUE


def test_memory_follows_the_size_of_the_subset():
    tracemalloc.start()
    try:
        draw_subset(10**9, 1000, philox(2))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200_000
