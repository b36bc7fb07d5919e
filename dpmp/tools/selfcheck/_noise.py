"""Measurements that noise and its key pass or fail.

Noise is judged by what anyone can see: releases of two sums that one example sets
apart, drawn in large numbers.
"""

import contextlib
import math
from collections.abc import Iterator

import numpy as np
from scipy import stats

from dpmp.tools.selfcheck._results import Result, Sizes, compare_to_limits
from dpmp.tools.selfcheck._subjects import NOISE_MULTIPLIER, Keys, Releases

# Noise that is right fails a measurement by chance once in a million runs, or less.
_STANDARD_ERRORS = 5.0
_CHANCE = 1e-6

_LARGEST_BETRAYING_SHARE = 0.05
_FEWEST_DISTINCT = 0.9
_WIDEST_NOISE = 1.01
_KEY_BITS = 128
_NUM_KEYS = 64

# Releases are sorted by size, from 3 standard deviations below both sums to 3 above.
_NUM_BINS = 256
_BIN_WIDTH = 6 * NOISE_MULTIPLIER / _NUM_BINS


def measure_noise(releases: Releases, sizes: Sizes) -> list[Result]:
    """Whether noise hides what the sum is, and whether it is Gaussian."""
    known, test = (
        [releases.draw(has_example, size) for has_example in (False, True)]
        for size in (sizes.num_training, sizes.num_test)
    )
    known = [np.sort(_at_least_float32(x)) for x in known]
    bins = [_bins(_at_least_float32(x)) for x in test]
    was_seen = [[_is_among(_at_least_float32(x), seen) for x in test] for seen in known]
    noise = test[0]
    return [
        _betraying_share(releases, bins, was_seen),
        _advantage(releases, bins, was_seen),
        _distinct_values(releases, noise),
        _largest_value(releases, noise),
        _stddev(releases, noise),
    ]


def _at_least_float32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.promote_types(x.dtype, np.float32))


def _bins(x: np.ndarray) -> np.ndarray:
    """Which of the bins an entry lies in, from 1; the first and last are open."""
    lowest = 0.5 - _BIN_WIDTH * _NUM_BINS / 2
    return np.clip((x - lowest) // _BIN_WIDTH + 1, 0, _NUM_BINS + 1).astype(np.int32)


def _is_among(x: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    place = np.searchsorted(ordered, x)
    return ordered[np.minimum(place, len(ordered) - 1)] == x


def _betraying_share(
    releases: Releases, bins: list[np.ndarray], was_seen: list[list[np.ndarray]]
) -> Result:
    """How many releases of one sum are numbers that the other one does not give.

    An attacker knows many releases of one sum. Of fresh ones of about one size, as many
    should be among them whichever sum they are of. If there are fewer of the other sum,
    that one gives numbers that the known one does not, and delta is at least their
    share, whatever epsilon is (if numbers of one size are about equally likely).
    """
    directions = [("of C, against 0", 1, 0), ("of 0, against C", 0, 1)]
    shares, errors = zip(
        *(
            _missing_share(
                (bins[own], bins[other]), (was_seen[own][own], was_seen[own][other])
            )
            for _, other, own in directions
        ),
        strict=True,
    )
    worst = int(np.argmax(shares))
    return compare_to_limits(
        "Share of releases that show by their last bits which sum they are of",
        releases,
        shares[worst],
        at_most=min(_STANDARD_ERRORS * errors[worst], _LARGEST_BETRAYING_SHARE),
        worst_case=directions[worst][0],
    )


def _missing_share(
    bins: tuple[np.ndarray, np.ndarray], was_seen: tuple[np.ndarray, np.ndarray]
) -> tuple[float, float]:
    """The share, and its standard error; NaN where nothing has been seen before."""
    num_own, num_other = (np.bincount(x, minlength=_NUM_BINS + 2) for x in bins)
    seen_own, seen_other = (
        np.bincount(x, weights=seen, minlength=_NUM_BINS + 2)
        for x, seen in zip(bins, was_seen, strict=True)
    )
    usable = num_own > 0
    usable[[0, -1]] = False
    weights = num_other[usable] / num_other.sum()
    expected = np.sum(weights * seen_own[usable] / num_own[usable])
    observed = np.sum(seen_other[usable]) / num_other.sum()
    if not expected:
        return math.nan, math.inf
    variance = (np.sum(weights**2 / num_own[usable]) + 1 / num_other.sum()) / 4
    share = (1 - observed / expected) * weights.sum()
    return float(share), float(math.sqrt(variance) / expected)


def _advantage(
    releases: Releases, bins: list[np.ndarray], was_seen: list[list[np.ndarray]]
) -> Result:
    """How much better than a coin one guesses the sum from one release.

    An attacker goes by its size, and by whether the very number has been seen before.
    What to make of that is learnt from one half of the releases.
    """
    cells = [4 * bins[i] + 2 * was_seen[0][i] + was_seen[1][i] for i in (0, 1)]
    half = len(cells[0]) // 2
    counts = [np.bincount(x[:half], minlength=4 * (_NUM_BINS + 2)) for x in cells]
    guesses_one = counts[1] > counts[0]
    false, true = (float(np.mean(guesses_one[x[half:]])) for x in cells)
    error = math.sqrt((true * (1 - true) + false * (1 - false)) / half)
    ideal = math.erf(1 / (NOISE_MULTIPLIER * 2 * math.sqrt(2)))
    return compare_to_limits(
        f"Advantage in guessing the sum from a release (in real numbers {ideal:.3f})",
        releases,
        true - false,
        at_most=ideal + _STANDARD_ERRORS * error,
    )


def _distinct_values(releases: Releases, noise: np.ndarray) -> Result:
    values = np.unique(_at_least_float32(noise))
    unit = float(np.diff(values).min(initial=np.inf))
    ideal = NOISE_MULTIPLIER * np.random.default_rng(0).normal(size=noise.size)
    on_grid = (unit * np.round(ideal / unit)).astype(noise.dtype)
    expected = len(np.unique(_at_least_float32(on_grid)))
    return compare_to_limits(
        "Distinct values of noise, over those of Gaussian noise on the same grid",
        releases,
        len(values) / expected,
        at_least=_FEWEST_DISTINCT,
        worst_case=f"{len(values)} in {noise.size}",
    )


def _largest_value(releases: Releases, noise: np.ndarray) -> Result:
    lowest = -math.expm1(math.log(_CHANCE) / noise.size) / 2
    return compare_to_limits(
        f"Largest of {noise.size} values of noise, in standard deviations",
        releases,
        float(np.max(np.abs(noise))) / NOISE_MULTIPLIER,
        at_least=float(stats.norm.isf(lowest)),
        at_most=float(stats.norm.isf(_CHANCE / noise.size / 2)),
    )


def _stddev(releases: Releases, noise: np.ndarray) -> Result:
    root = math.sqrt(np.mean(np.square(noise, dtype=np.float64)))
    error = _STANDARD_ERRORS / math.sqrt(2 * noise.size)
    return compare_to_limits(
        "Standard deviation of noise, over the one asked for",
        releases,
        root / NOISE_MULTIPLIER,
        at_least=1 - error,
        at_most=_WIDEST_NOISE + error,
    )


def measure_keys(keys: Keys) -> list[Result]:
    """How many bits of a key differ between draws, and make a difference to noise."""
    with _numpy_state_restored():
        drawn = [keys.draw() for _ in range(_NUM_KEYS)]
        seeded = []
        for _ in range(_NUM_KEYS):
            np.random.seed(0)
            seeded.append(keys.draw())
    return [
        compare_to_limits(
            f"Bits of the key that vary, and that the noise depends on{condition}",
            keys,
            _num_effective_bits(keys, words),
            at_least=_KEY_BITS,
        )
        for condition, words in (("", drawn), (", after numpy.random.seed(0)", seeded))
    ]


@contextlib.contextmanager
def _numpy_state_restored() -> Iterator[None]:
    state = np.random.get_state()
    try:
        yield
    finally:
        np.random.set_state(state)


def _num_effective_bits(keys: Keys, drawn: list[np.ndarray]) -> int:
    first = np.asarray(drawn[0], np.uint32)
    varies = np.bitwise_or.reduce([words ^ first for words in drawn])
    noise = keys.noise(first)
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    flips = [(i, bit) for i, word in enumerate(varies) for bit in bits if word & bit]
    num_effective = 0
    for i, bit in flips:
        flipped = np.array(first)
        flipped[i] ^= bit
        num_effective += not np.array_equal(noise, keys.noise(flipped))
    return num_effective
