"""Measurements that a private sum, its noise and its key pass or fail.

Norms and distances are computed in exact arithmetic. Noise is judged by what anyone can
see: releases of two sums that one example sets apart, drawn in large numbers.
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from scipy import stats

from dpmp._selfcheck_subjects import NOISE_MULTIPLIER, Keys, Releases, Rows, Sums

# Noise that is right fails a measurement by chance once in a million runs, or less.
_STANDARD_ERRORS = 5.0
_CHANCE = 1e-6

_SMALLEST_CLIPPED_NORM = 0.98
_LARGEST_BETRAYING_SHARE = 0.05
_FEWEST_DISTINCT = 0.9
_WIDEST_NOISE = 1.01
_KEY_BITS = 128
_NUM_KEYS = 64

# Releases are sorted by size, from 3 standard deviations below both sums to 3 above.
_NUM_BINS = 256
_BIN_WIDTH = 6 * NOISE_MULTIPLIER / _NUM_BINS

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


@dataclass(frozen=True)
class Result:
    """What was measured, and what is allowed.

    Attributes:
      measurement: what was measured.
      subject: what it was measured on.
      is_claimed: whether dpmp promises that it passes.
      value: the measured one, to float64.
      at_least: a limit, if there is one.
      at_most: a limit, if there is one.
      passed: whether the exact value is within the limits.
      worst_case: where it was measured.
    """

    measurement: str
    subject: str
    is_claimed: bool
    value: float
    at_least: float | None
    at_most: float | None
    passed: bool
    worst_case: str


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
      num_entries: of a gradient in one leaf.
      num_leaves: of a gradient in many.
      largest_batch: for which sums are compared.
      num_training: releases of each sum that an attacker has seen before.
      num_test: releases of each sum that the attacker has to tell apart.
    """

    num_entries: int = 20_000
    num_leaves: int = 3000
    largest_batch: int = 4096
    num_training: int = 2**23
    num_test: int = 2**20


def _result(
    measurement: str,
    subject: Sums | Releases | Keys,
    value: Fraction | float,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    worst_case: str = "",
    is_squared: bool = False,
) -> Result:
    """Compares a value, or a root that is given as its square, to its limits."""
    value = value if isinstance(value, Fraction) else float(value)
    power = 2 if is_squared else 1
    return Result(
        measurement,
        subject.name,
        subject.is_claimed,
        math.sqrt(value) if is_squared else float(value),
        at_least,
        at_most,
        (at_least is None or value >= Fraction(at_least) ** power)
        and (at_most is None or value <= Fraction(at_most) ** power),
        worst_case,
    )


# Sums.


def measure_contributions(sums: Sums, sizes: Sizes) -> list[Result]:
    """The largest and the smallest norm of a gradient that has to be clipped."""
    make = functools.cache(sums.make)
    ratios = {}
    for name, l2_clip_norm, leaves in _examples(sizes):
        if l2_clip_norm < sums.smallest_clip_norm:
            continue
        sum_fn, bound = make(l2_clip_norm, None)
        contribution = sum_fn([x[None] for x in leaves], np.zeros(1, bool))
        ratios[name] = squared_norm(contribution) / bound**2
    largest, smallest = (pick(ratios, key=ratios.__getitem__) for pick in (max, min))
    return [
        _result(
            "Norm of a clipped gradient, over C: largest",
            sums,
            ratios[largest],
            at_most=1.0,
            worst_case=largest,
            is_squared=True,
        ),
        _result(
            "Norm of a clipped gradient, over C: smallest",
            sums,
            ratios[smallest],
            at_least=_SMALLEST_CLIPPED_NORM,
            worst_case=smallest,
            is_squared=True,
        ),
    ]


class _Example(NamedTuple):
    name: str
    l2_clip_norm: float
    leaves: list[np.ndarray]


def _examples(sizes: Sizes) -> Iterator[_Example]:
    """Gradients with norms well above the clip norm."""
    for dtype in _DTYPES:
        for name, entries in _entries(sizes.num_entries, dtype).items():
            x = entries.astype(dtype)
            yield _Example(f"{name}, {x.dtype.name}", 0.003, [x])
    for name, decades in (("equal leaves", 0), ("leaves of many sizes", 3)):
        leaves = list(_mixed_leaves(min(99, sizes.num_leaves), decades))
        yield _Example(f"{len(leaves)} {name}, mixed", 0.003, leaves)
    # A sum of squares in bfloat16 remains where the first of them brings it.
    leaves = [np.full(1, 1 / 16 if i else 1) for i in range(sizes.num_leaves)]
    leaves = [x.astype(jnp.bfloat16) for x in leaves]
    yield _Example(f"{len(leaves)} leaves, bfloat16", 0.003, leaves)
    tiny = np.full(2000, 1e-23, np.float32)
    yield _Example("entries of 1e-23, float32", 1e-22, [tiny])


def _entries(size: int, dtype: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    large = 300 if dtype == jnp.float16 else 1e15
    one_large = np.full(size, 2.0**-12)
    one_large[0] = 1
    normal = rng.normal(size=size)
    return {
        "equal entries": np.full(size, 1 / 3),
        f"entries of {large:g}": np.full(size, large),
        "entries of 1.5e-4": np.full(size, 1.5e-4),
        "one large entry": one_large,
        "random entries": normal,
        "entries of many sizes": normal * 10 ** rng.uniform(-4, 3, size),
    }


def _mixed_leaves(num_leaves: int, decades: float) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(0)
    for i in range(num_leaves):
        value = 10 ** rng.uniform(-decades, decades) / 3
        yield np.full((1, 3, 17, 64)[i % 4], value).astype(_DTYPES[i % 3])


def measure_sensitivity(sums: Sums, sizes: Sizes) -> list[Result]:
    """The largest change of a sum when one example is left out of the batch."""
    changes = {}
    for shape in sums.batches:
        if shape.size > sizes.largest_batch:
            continue
        sum_fn, bound = sums.make(1.0, shape.microbatch_size)
        for name, batch in _batches(shape.size, shape.dtype).items():
            total = sum_fn([batch], np.zeros(shape.size, bool))
            for how, neighbour, is_padding in _neighbours(batch):
                difference = _difference(total, sum_fn([neighbour], is_padding))
                where = f"{name}, {shape}, {how}"
                changes[where] = squared_norm(difference) / bound**2
    worst_case = max(changes, key=changes.__getitem__)
    return [
        _result(
            "Change of the sum between neighbouring batches, over C: largest",
            sums,
            changes[worst_case],
            at_most=1.0,
            worst_case=worst_case,
            is_squared=True,
        )
    ]


def _batches(size: int, dtype: Any) -> dict[str, np.ndarray]:
    """Examples, (B, 4), some of a norm of 1 and more."""
    equal = np.full((size, 4), 0.5)
    # A running sum rounds each of the small ones up to a whole unit in the last place
    # of a power of two. Without the first example it stays below that power, where
    # units are half as large, and gains half as much.
    stagnating = np.array(equal)
    stagnating[size // 2 :] *= 0.7 * float(jnp.finfo(dtype).eps) * (size // 2)
    normal = np.random.default_rng(size).normal(size=(size, 4))
    batches = {
        "equal": equal,
        "alternating": equal * np.resize([1.0, -1.0], size)[:, None],
        "stagnating": stagnating,
        "random": normal,
        "many sizes": normal * np.logspace(-6, 6, size)[:, None],
    }
    return {name: examples.astype(dtype) for name, examples in batches.items()}


def _neighbours(batch: np.ndarray) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Batches without one example, and which of theirs are padding.

    The others stay in their slots, or those after it move up.
    """
    size = len(batch)
    slots = np.arange(size)
    for name, i in (("first", 0), ("middle", size // 2), ("last", size - 1)):
        yield f"{name} blanked", batch, slots == i
        moved = np.concatenate([np.delete(batch, i, axis=0), batch[i : i + 1]])
        yield f"{name} removed", moved, slots == size - 1


def _difference(a: Rows, b: Rows) -> Rows:
    return [np.concatenate([x, -y]) for x, y in zip(a, b, strict=True)]


def squared_norm(tree: Rows) -> Fraction | float:
    """The squared L2 norm, exactly; infinite for what is not finite."""
    if not all(np.isfinite(x).all() for x in tree):
        return math.inf
    return sum((_sum_of_squares(x) for x in tree), Fraction(0))


def _sum_of_squares(rows: np.ndarray) -> Fraction:
    mantissas, exponents = np.frexp(rows)
    lowest = int(exponents.min(initial=0))
    integers = (mantissas * 2.0**53).astype(np.int64).astype(object)
    entries = np.sum(integers << (exponents - lowest).astype(object), axis=0)
    return sum(x * x for x in entries.tolist()) * Fraction(4) ** (lowest - 53)


# Noise.


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
    return _result(
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
    return _result(
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
    return _result(
        "Distinct values of noise, over those of Gaussian noise on the same grid",
        releases,
        len(values) / expected,
        at_least=_FEWEST_DISTINCT,
        worst_case=f"{len(values)} in {noise.size}",
    )


def _largest_value(releases: Releases, noise: np.ndarray) -> Result:
    lowest = -math.expm1(math.log(_CHANCE) / noise.size) / 2
    return _result(
        f"Largest of {noise.size} values of noise, in standard deviations",
        releases,
        float(np.max(np.abs(noise))) / NOISE_MULTIPLIER,
        at_least=float(stats.norm.isf(lowest)),
        at_most=float(stats.norm.isf(_CHANCE / noise.size / 2)),
    )


def _stddev(releases: Releases, noise: np.ndarray) -> Result:
    root = math.sqrt(np.mean(np.square(noise, dtype=np.float64)))
    error = _STANDARD_ERRORS / math.sqrt(2 * noise.size)
    return _result(
        "Standard deviation of noise, over the one asked for",
        releases,
        root / NOISE_MULTIPLIER,
        at_least=1 - error,
        at_most=_WIDEST_NOISE + error,
    )


# Keys.


def measure_keys(keys: Keys) -> list[Result]:
    """How many bits of a key differ between draws, and make a difference to noise."""
    with _numpy_state_restored():
        drawn = [keys.draw() for _ in range(_NUM_KEYS)]
        seeded = []
        for _ in range(_NUM_KEYS):
            np.random.seed(0)
            seeded.append(keys.draw())
    return [
        _result(
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
