"""Measures noise and its key.

The measurements use only public values: noisy sums of a batch with one example and of a
batch without any, drawn in large numbers.
"""

import functools
import math

import numpy as np
from scipy import stats

from dpmp.tools.selfcheck._subjects import (
    NOISE_MULTIPLIER,
    Keys,
    Releases,
    Result,
    Sizes,
    compare,
)

# Correct noise fails a measurement by chance once in a million runs, or less.
_STANDARD_ERRORS = 5.0
_CHANCE = 1e-6

_LARGEST_BETRAYING_SHARE = 0.05
_FEWEST_DISTINCT = 0.9
_WIDEST_NOISE = 1.01
_KEY_BITS = 128
_NUM_KEYS = 64

# Noisy sums are sorted into bins by size: 256 bins up to 3 standard deviations from the
# middle of the two sums without noise, and an open bin on either side.
_EDGES = 0.5 + 3 * NOISE_MULTIPLIER * np.linspace(-1, 1, 257)
_NUM_BINS = len(_EDGES) + 1


def measure_noise(releases: Releases, sizes: Sizes) -> list[Result]:
    """Whether noise hides the sum, and whether it is Gaussian."""

    def draw(num: int) -> list[np.ndarray]:
        return [releases.draw(has_example, num) for has_example in (False, True)]

    known = [np.sort(_at_least_float32(x)) for x in draw(sizes.num_training)]
    test = draw(sizes.num_test)
    wide = [_at_least_float32(x) for x in test]
    bins = [np.digitize(x, _EDGES) for x in wide]
    was_seen = [[_is_among(x, ordered) for x in wide] for ordered in known]
    return [
        _distinguishing_share(releases, bins, was_seen),
        _advantage(releases, bins, was_seen),
        *_distribution(releases, test[0]),
    ]


def _at_least_float32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.promote_types(x.dtype, np.float32))


def _is_among(x: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    order = np.argsort(x)  # a search in order stays in the processor's caches
    place = np.searchsorted(ordered, x[order])
    found = np.empty(len(x), bool)
    found[order] = ordered[np.minimum(place, len(ordered) - 1)] == x[order]
    return found


def _distinguishing_share(
    releases: Releases, bins: list[np.ndarray], was_seen: list[list[np.ndarray]]
) -> Result:
    """The share of noisy values that only one of the two sums can give.

    An attacker knows many noisy values of one sum. Among fresh noisy values of about
    the same size, equally many should be known, whichever sum they belong to. If fewer
    of the other sum's values are known, then some of these are values that the known
    sum cannot give, and delta is at least their share, for every epsilon (if values of
    one size are about equally likely).
    """
    names = ("sum 1, 0 known", "sum 0, 1 known")
    found = [
        _missing_share(bins[i], bins[1 - i], was_seen[i][i], was_seen[i][1 - i])
        for i in (0, 1)
    ]
    shares, errors = zip(*found, strict=True)
    worst = int(np.argmax(shares))
    return compare(
        "Share of noisy sums whose last bits reveal the sum without noise",
        releases,
        shares[worst],
        at_most=min(_STANDARD_ERRORS * errors[worst], _LARGEST_BETRAYING_SHARE),
        worst_case=names[worst],
    )


def _missing_share(
    own: np.ndarray, other: np.ndarray, seen_own: np.ndarray, seen_other: np.ndarray
) -> tuple[float, float]:
    """The share, with its standard error; NaN if no value was seen before."""
    count = functools.partial(np.bincount, minlength=_NUM_BINS)
    num_own, num_other = count(own), count(other)
    usable = num_own > 0
    usable[[0, -1]] = False
    weights = num_other[usable] / num_other.sum()
    expected = np.sum(weights * count(own, seen_own)[usable] / num_own[usable])
    observed = np.sum(count(other, seen_other)[usable]) / num_other.sum()
    if not expected:
        return math.nan, math.inf
    variance = (np.sum(weights**2 / num_own[usable]) + 1 / num_other.sum()) / 4
    share = (1 - observed / expected) * weights.sum()
    return float(share), float(math.sqrt(variance) / expected)


def _advantage(
    releases: Releases, bins: list[np.ndarray], was_seen: list[list[np.ndarray]]
) -> Result:
    """The advantage over a coin of an attacker who guesses a sum from a noisy value.

    The attacker uses the size of the value, and whether the very same value is known.
    From one half of the values, the attacker learns which sum these features suggest.
    """
    cells = [4 * bins[i] + 2 * was_seen[0][i] + was_seen[1][i] for i in (0, 1)]
    half = len(cells[0]) // 2
    counts = [np.bincount(x[:half], minlength=4 * _NUM_BINS) for x in cells]
    guesses_one = counts[1] > counts[0]
    false, true = (float(np.mean(guesses_one[x[half:]])) for x in cells)
    error = math.sqrt((true * (1 - true) + false * (1 - false)) / half)
    ideal = math.erf(1 / (NOISE_MULTIPLIER * 2 * math.sqrt(2)))
    return compare(
        f"Advantage in guessing the sum from a noisy one (ideal: {ideal:.3f})",
        releases,
        true - false,
        at_most=ideal + _STANDARD_ERRORS * error,
    )


def _distribution(releases: Releases, noise: np.ndarray) -> list[Result]:
    """Whether noise has the values, the extremes and the scale of a Gaussian."""
    values = np.unique(_at_least_float32(noise))
    unit = float(np.diff(values).min(initial=np.inf))
    ideal = NOISE_MULTIPLIER * np.random.default_rng(0).normal(size=noise.size)
    on_grid = (unit * np.round(ideal / unit)).astype(noise.dtype)
    lowest = -math.expm1(math.log(_CHANCE) / noise.size) / 2
    root = math.sqrt(np.mean(np.square(noise, dtype=np.float64)))
    error = _STANDARD_ERRORS / math.sqrt(2 * noise.size)
    return [
        compare(
            "Distinct values of noise, over those of Gaussian noise on the same grid",
            releases,
            len(values) / len(np.unique(_at_least_float32(on_grid))),
            at_least=_FEWEST_DISTINCT,
            worst_case=f"{len(values)} in {noise.size}",
        ),
        compare(
            f"Largest of {noise.size} values of noise, in standard deviations",
            releases,
            np.max(np.abs(noise)) / NOISE_MULTIPLIER,
            at_least=float(stats.norm.isf(lowest)),
            at_most=float(stats.norm.isf(_CHANCE / noise.size / 2)),
        ),
        compare(
            "Standard deviation of noise, over the requested one",
            releases,
            root / NOISE_MULTIPLIER,
            at_least=1 - error,
            at_most=_WIDEST_NOISE + error,
        ),
    ]


def measure_keys(keys: Keys) -> list[Result]:
    """Counts the bits of a key that differ between draws and change the noise."""
    state = np.random.get_state()
    try:
        drawn, seeded = [keys.draw() for _ in range(_NUM_KEYS)], []
        for _ in range(_NUM_KEYS):
            np.random.seed(0)
            seeded.append(keys.draw())
    finally:
        np.random.set_state(state)
    title = "Bits of the key that vary, and that the noise depends on"
    return [
        compare(name, keys, _num_effective_bits(keys, words), at_least=_KEY_BITS)
        for name, words in (
            (title, drawn),
            (f"{title}, after numpy.random.seed(0)", seeded),
        )
    ]


def _num_effective_bits(keys: Keys, drawn: list[np.ndarray]) -> int:
    first = np.asarray(drawn[0], np.uint32)
    varies = np.bitwise_or.reduce([words ^ first for words in drawn])
    noise = keys.noise(first)
    num_effective = 0
    for i in range(32 * first.size):
        bit = np.zeros_like(first)
        bit[i // 32] = np.uint32(1) << np.uint32(i % 32)
        if np.any(varies & bit):
            num_effective += not np.array_equal(noise, keys.noise(first ^ bit))
    return num_effective
