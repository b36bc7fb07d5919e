"""What the privatizer releases: noise of a known scale, from a key and a step."""

import functools
import itertools
import math
import types
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import UNOPTIMIZED
from scipy import stats

from dpmp import clipped_grad
from dpmp.noise_addition import (
    NoiseState,
    _add_noise,
    _privatizers,
    gaussian_privatizer,
)
from dpmp.noise_addition._discrete_gaussian import DiscreteGaussian
from dpmp.numerics._grid import GridArray, round_to_grid

KEY = jax.random.key(20240607)
NUM_DRAWS = 100_000
# Programs are compiled for a shape: the fewer there are, the faster these tests.
FEW = 1000
# With fixed keys nothing flakes; this is for the day on which a key changes.
SMALLEST_P_VALUE = 1e-6
# Where a snapped sum is cut off, in units.
CUT = 2**31 - 2**27


def make_privatizer(*, stddev=1.0, prng_key=KEY, **kwargs):
    """A privatizer for a noise multiplier of 1, unless something else is said."""
    kwargs.setdefault("l2_sensitivity", stddev or 1.0)
    return gaussian_privatizer(stddev=stddev, prng_key=prng_key, **kwargs)


@functools.cache
def compiled_update(*, is_optimized=True, **kwargs):
    options = None if is_optimized else UNOPTIMIZED
    return jax.jit(make_privatizer(**kwargs).update, compiler_options=options)


def release(total, *, key=KEY, step=0, **kwargs):
    """What comes out for a sum at some step: one program for each set of options."""
    state = NoiseState(key, jnp.asarray(step, jnp.int32))
    return compiled_update(**kwargs)(total, state)[0]


def zeros_on_grid(unit, shape):
    """An exact sum of zeros, for the noise alone."""
    return GridArray(np.zeros(shape, np.int32), unit)


def key_of(words):
    return jax.random.wrap_key_data(words, impl="threefry4x32")


def are_uncorrelated(x, y):
    x, y = x.ravel(), y.ravel()
    z = np.sum(x * y) / np.sqrt(np.sum(x**2) * np.sum(y**2)) * np.sqrt(x.size)
    return abs(z) < 5


# The noise has the scale that was asked for.


@pytest.mark.parametrize(("dtype", "stddev"), [(np.float32, 1e-6), (np.float64, 2.0)])
def test_the_noise_of_float_sums_is_gaussian_and_has_the_given_scale(dtype, stddev):
    zeros = np.zeros(NUM_DRAWS, dtype)
    with jax.enable_x64(dtype == np.float64):
        noise = np.float64(release(zeros, is_optimized=False, stddev=stddev))
    # The standard error of the first is 0.2 %.
    assert math.isclose(np.std(noise), stddev, rel_tol=0.015)
    assert abs(np.mean(noise)) < 5 * stddev / np.sqrt(NUM_DRAWS)
    assert stats.kstest(noise / stddev, "norm").pvalue > SMALLEST_P_VALUE


# It is a function of key, step, leaf and place, and of nothing else.


def test_leaves_of_one_shape_are_independent():
    zeros = jnp.zeros(NUM_DRAWS)
    total = {"a": zeros, "b": zeros, "c": zeros_on_grid(2.0**-15, NUM_DRAWS)}
    noisy = release(total, is_optimized=False)
    noise = {name: np.asarray(x, np.float64) for name, x in noisy.items()}
    for first, second in ("ab", "ac", "bc"):
        assert are_uncorrelated(noise[first], noise[second])
        assert np.mean(noise[first] == noise[second]) < 1e-3


def test_the_noise_is_that_of_the_sampler():
    words = np.array([1, 2, 3, 4], np.uint32)
    total = [zeros_on_grid(1.0, (5,)), zeros_on_grid(0.5, (2, 3))]
    noisy = release(total, stddev=1e3, key=key_of(words), step=7)
    for leaf, (noise, unit) in enumerate(zip(noisy, (1.0, 0.5), strict=True)):
        sampler = DiscreteGaussian.at_least(1000 / unit)
        sample = functools.partial(sampler.sample, shape=noise.shape, leaf=leaf)
        steps = jax.jit(sample)(words, step=jnp.int32(7))
        np.testing.assert_array_equal(noise, np.asarray(steps) * unit)


def test_keys_of_two_words_are_taken():
    assert jax.random.key_data(KEY).shape == (2,)
    wide = np.append(np.asarray(jax.random.key_data(KEY)), np.zeros(2, np.uint32))
    zeros = np.zeros(FEW, np.float32)
    np.testing.assert_array_equal(release(zeros, key=key_of(wide)), release(zeros))


def test_sums_shift_noise_that_does_not_depend_on_them():
    sums = np.resize(np.float32([0.0, 1.0, -3.0, 128.0]) * 2**15, FEW)
    alone, _ = release(
        (np.zeros(FEW, np.float32), np.zeros(FEW, np.float32)), stddev=1e6
    )
    noisy, _ = release((jnp.asarray(sums), np.ones(FEW, np.float32)), stddev=1e6)
    # Float32 numbers below 2^24 are at most 1 apart; the unit of the grid is 2.
    np.testing.assert_allclose(noisy - alone, sums, rtol=0, atol=1.0)
    # Exact sums do so exactly.
    steps = np.resize(np.int32([0, 1, -1, 32767, -123456, 2**22]), FEW)
    noise = np.asarray(release(zeros_on_grid(2.0**-15, FEW)))
    noisy = release(GridArray(jnp.asarray(steps), 2.0**-15))
    np.testing.assert_array_equal((np.asarray(noisy) - noise) * 2**15, steps)


def test_the_step_is_counted_and_a_step_that_is_run_again_repeats_its_release():
    state = make_privatizer().init(np.zeros(FEW, np.float32))
    assert state.step == 0
    for step in range(3):
        noisy, state = compiled_update()(np.zeros(FEW, np.float32), state)
        np.testing.assert_array_equal(
            noisy, release(np.zeros(FEW, np.float32), step=step)
        )
        assert state.step == step + 1
        assert state.step.dtype == jnp.int32
    assert jnp.all(jax.random.key_data(state.prng_key) == jax.random.key_data(KEY))


def test_without_a_key_every_init_draws_128_bits():
    init = gaussian_privatizer(stddev=1.0).init
    words = np.array([jax.random.key_data(init(None).prng_key) for _ in range(20)])
    assert words.dtype == np.uint32
    assert words.shape == (20, 4)
    assert len(np.unique(words)) == words.size


# It is never narrower than asked, and little wider.


def choices(total, **kwargs):
    """The unit for float sums, and the widths asked of the sampler, in units."""
    units, widths = [None], []
    snapping = _privatizers.grid_of_floats

    def recording_snapping(*args):
        unit, widened = snapping(*args)
        units.append(unit)
        return unit, widened

    def recording_at_least(width):
        widths.append(width)
        return types.SimpleNamespace(
            sample=lambda key, shape, **_: jnp.zeros(shape, jnp.int32)
        )

    recorder = types.SimpleNamespace(at_least=recording_at_least)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_privatizers, "grid_of_floats", recording_snapping)
        patch.setattr(_add_noise, "DiscreteGaussian", recorder)
        # Traced alone, a sum may have any size.
        privatizer = gaussian_privatizer(prng_key=KEY, **kwargs)
        jax.eval_shape(privatizer.update, total, privatizer.init(None))
    return units[-1], widths


def chosen(leaf, **kwargs):
    """The unit of the grid, and the noise that the privatizer chooses for one leaf."""
    unit, (width,) = choices(leaf, **kwargs)
    return Fraction(getattr(leaf, "unit", unit)), DiscreteGaussian.at_least(width)


def abstract(size, dtype=jnp.float32):
    return jax.ShapeDtypeStruct((size,), dtype)


@hypothesis.given(
    stddev=st.floats(1e-6, 1e6), log_num_units=st.floats(0, 22), c=st.integers(1, 99)
)
def test_the_noise_of_exact_sums_is_at_least_as_wide_as_asked(stddev, log_num_units, c):
    unit = float(np.float32(stddev * c / 100 / 2**log_num_units))
    leaf = GridArray(abstract(c, jnp.int32), unit)
    hypothesis.assume(Fraction(stddev) <= 67_000_000 * Fraction(unit))
    grid, noise = chosen(leaf, stddev=stddev)
    effective = Fraction(noise.effective_stddev) * grid
    assert grid == Fraction(unit)
    assert effective >= Fraction(stddev)
    assert effective < Fraction(stddev) * Fraction("1.04") or stddev < 3000 * unit
    assert effective < Fraction(stddev) * Fraction("1.0025") or stddev < 33_000 * unit
    # Nothing is snapped, and nothing paid for it.
    assert chosen(leaf, stddev=stddev, l2_sensitivity=stddev / 1e9) == (grid, noise)


@hypothesis.given(
    stddev=st.floats(1e-6, 1e6),
    noise_multiplier=st.floats(1e-3, 30),
    size=st.integers(1, 10**9),
    is_given=st.booleans(),
)
def test_the_noise_of_float_sums_covers_the_snap(
    stddev, noise_multiplier, size, is_given
):
    l2_sensitivity = stddev / noise_multiplier
    kwargs = {"l2_sensitivity": l2_sensitivity} if is_given else {}
    unit, noise = chosen(abstract(size), stddev=stddev, **kwargs)
    # Two sums are moved apart by half a unit each, in every entry.
    snapped_sensitivity = Fraction(l2_sensitivity) + root_above(size) * unit
    noise_multiplier = Fraction(stddev) / Fraction(l2_sensitivity)
    effective = Fraction(noise.effective_stddev) * unit
    assert effective >= noise_multiplier * snapped_sensitivity
    cost = (noise_multiplier if is_given else 32) * root_above(size) * unit
    assert effective <= (Fraction(stddev) + cost) * Fraction("1.01")


def root_above(n):
    """The square root of an integer, rounded up in the 30th bit after the point."""
    return Fraction(math.isqrt(n << 60) + 1, 2**30)


def snap_cost(size, stddev, **kwargs):
    """By what share of itself rounding to the grid widens the noise, at most."""
    unit, noise = chosen(abstract(size), stddev=stddev, **kwargs)
    cost = Fraction(noise.effective_stddev) * unit / Fraction(stddev) - 1
    # The noise does not come in all widths.
    return float(cost) - 0.0025


@pytest.mark.parametrize("stddev", [1.0, 1.999, 1e-6])
def test_snapping_costs_little_and_more_without_a_sensitivity(stddev):
    sensitivity = {"l2_sensitivity": stddev}
    assert snap_cost(2**16, stddev, **sensitivity) <= 1 / 4096
    assert snap_cost(10**6, stddev, **sensitivity) <= 1000 / 2**20
    assert snap_cost(10**6, stddev) > 0.01
    assumed = {"l2_sensitivity": stddev / 32}
    for size in (1, 10**4, 10**6, 10**9):
        as_assumed = chosen(abstract(size), stddev=stddev, **assumed)
        assert chosen(abstract(size), stddev=stddev) == as_assumed


def test_the_entries_of_all_leaves_are_paid_for():
    def widths(*sizes):
        total = [abstract(size) for size in sizes]
        return choices(total, stddev=1.0, l2_sensitivity=1.0)[1]

    assert widths(10**6, 24 * 10**6) == widths(25 * 10**6) * 2
    (extra,) = (width - 2**20 for width in widths(25 * 10**6))
    assert 5000 < extra < 5000.1


def test_what_rounding_costs_some_leaves_widens_the_noise_of_all():
    # The exact leaf may take all of the sensitivity, and rounding move the others.
    total = [GridArray(abstract(1, jnp.int32), 1.0), abstract(10**6)]
    _, widths = choices(total, stddev=32768.0, l2_sensitivity=32768.0)
    unit = Fraction(32768, 2**20)
    assert widths[0] >= 32768 + Fraction(math.sqrt(10**6 + 1)) * unit
    assert widths[1] == widths[0] / unit


# What comes out is on the grid.


@pytest.mark.parametrize(("stddev", "noise_multiplier"), [(1e-6, 32.0), (1.0, 1.0)])
def test_releases_of_float_sums_are_multiples_of_the_unit(stddev, noise_multiplier):
    kwargs = {"stddev": stddev, "l2_sensitivity": stddev / noise_multiplier}
    unit, _ = chosen(abstract(FEW), **kwargs)
    for value in (0.0, stddev / noise_multiplier, -0.3 * stddev, 900.0 * stddev):
        total = np.full(FEW, value, np.float32)
        noisy = release(total, is_optimized=False, **kwargs)
        ratios = [Fraction(y) / unit for y in np.asarray(noisy).tolist()]
        assert all(ratio.denominator == 1 for ratio in ratios)
        # And of no other: what is beyond 2^24 units is rounded to float32.
        is_odd = any(ratio.numerator % 2 for ratio in ratios)
        assert is_odd or value > 100 * stddev


def test_sums_with_noise_wrap_around():
    steps = np.resize(np.int32([2**31 - 1, -(2**31), 2**31 - 500]), FEW)
    total = GridArray(jnp.asarray(steps), 2.0**-10)
    noise = release(zeros_on_grid(2.0**-10, FEW))
    noisy = release(total)
    exact = [
        (int(s) + int(n * 2**10) + 2**31) % 2**32 - 2**31
        for s, n in zip(steps, np.asarray(noise), strict=True)
    ]
    assert min(exact) < 0 < max(exact)
    np.testing.assert_array_equal(noisy, np.float32(exact) * np.float32(2.0**-10))


# Float sums are snapped to the grid.


def snap(leaf, stddev, cost):
    """The unit, and the steps of a float sum as Python integers."""
    unit, _ = _privatizers.grid_of_floats(stddev, cost)
    snapped = round_to_grid(leaf, unit)
    return snapped.unit, [int(count) for count in snapped.counts]


def numbers_to_snap(rng, stddev, cost, dtype):
    """Numbers of all magnitudes up to the cut and beyond it, ties, and near-ties."""
    unit, _ = snap(jnp.zeros(1), stddev, cost)
    scales = np.exp2(rng.uniform(-6, 33, 90)) * rng.choice([-1, 1], 90)
    ties = rng.integers(-(2**22), 2**22, 20) + 0.5
    limits = np.array([CUT, CUT - 2**8, 2**31, 2**32, 2.0**60]) * [[1], [-1]]
    numbers = np.concatenate([scales, ties, limits.ravel()]) * unit
    numbers = numbers.astype(dtype)
    below, above = (np.nextafter(numbers[90:110], np.array(s, dtype)) for s in (-9, 9))
    return np.concatenate([numbers, below, above, np.zeros(1, dtype)])


def check_snap(numbers, steps, unit):
    """Checks rounding, order, distances and cut, in exact arithmetic."""
    exact = [number / Fraction(unit) for number in numbers]
    pairs = sorted(zip(exact, steps, strict=True))
    for x, step in pairs:
        if abs(x) <= CUT:
            assert abs(step - x) <= Fraction(1, 2)
        else:
            assert step == (CUT if x > 0 else -CUT)
    for (x, step), (above, step_above) in itertools.pairwise(pairs):
        assert 0 <= step_above - step <= above - x + 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@hypothesis.given(
    seed=st.integers(0, 2**32 - 1),
    stddev=st.floats(-40, 40).map(lambda x: 10 ** (x / 4)),
    cost=st.sampled_from([0.1, 1.0, 17.0, 300.0, 1e6]),
)
@hypothesis.example(seed=0, stddev=1e-20, cost=1.0)
@hypothesis.example(seed=0, stddev=1e20, cost=1e6)
@hypothesis.settings(max_examples=5)
def test_float_sums_are_rounded_to_the_grid(dtype, seed, stddev, cost):
    with jax.enable_x64(dtype == np.float64):
        numbers = numbers_to_snap(np.random.default_rng(seed), stddev, cost, dtype)
        unit, steps = snap(jnp.asarray(numbers), stddev, cost)
    check_snap(map(Fraction, numbers.tolist()), steps, unit)


@pytest.mark.parametrize(("kind", "stddev"), [("float32", 1e-6), ("float64", 1.0)])
def test_sums_that_are_cut_off_are_no_further_apart(kind, stddev):
    largest = float(np.finfo(np.float32).max)
    values = [3000 * stddev, 1e30, 2e30, largest, math.inf]
    values = np.resize(values + [-x for x in values], FEW)
    with jax.enable_x64(kind == "float64"):
        total = jnp.asarray(values)
        _, steps = snap(total, stddev, 300.0)
        noisy = release(total, stddev=stddev)
    assert steps == [CUT if x > 0 else -CUT for x in values]
    # Noise does not make them wrap around.
    np.testing.assert_array_equal(np.sign(noisy), np.sign(values))
    assert np.all(np.abs(noisy) < 2.0**18 * stddev)


def test_an_entry_that_is_no_number_changes_no_other():
    total = np.linspace(-1.0, 1.0, FEW, dtype=np.float32)
    broken = np.where(np.arange(FEW) == 2, np.float32(np.nan), total)
    noisy, expected = (release(x) for x in (broken, total))
    assert np.all(np.isfinite(noisy))
    is_broken = np.isnan(broken)
    np.testing.assert_array_equal(noisy[~is_broken], expected[~is_broken])


# The total variation distance of normals that are one standard deviation apart.
# What comes out, and from what.


def test_stddev_zero_returns_the_sum_itself():
    x = jnp.linspace(-1.0, 1.0, 100)
    total = {
        "float": x,
        "grid": GridArray(jnp.arange(-50, 50, dtype=jnp.int32), 0.25),
    }
    noisy = release(total, stddev=0.0)
    np.testing.assert_array_equal(noisy["float"], x)
    np.testing.assert_array_equal(noisy["grid"], np.arange(-12.5, 12.5, 0.25))


def test_trees_and_arrays_without_entries_have_no_noise():
    assert release([{}, None]) == [{}, None]
    shape = (3, 0, 2)
    empty = GridArray(np.zeros(shape, np.int32), 1.0)
    flat = GridArray(np.zeros(3, np.int32), 0.0)
    noisy = release([np.zeros(shape, np.float32), empty, flat])
    assert [x.shape for x in noisy] == [shape, shape, (3,)]
    assert {x.dtype for x in noisy} == {jnp.dtype(jnp.float32)}
    np.testing.assert_array_equal(noisy[2], np.zeros(3))


@pytest.mark.parametrize("stddev", [1e-24, 1e30])
def test_the_smallest_and_the_largest_noise_hide_a_sum(stddev):
    for value in (0.0, stddev):
        total = np.full(4000, value, np.float32)
        noisy = release(total, stddev=stddev, is_optimized=False)
        positive = np.mean(np.asarray(noisy) > 0)
        assert abs(positive - stats.norm.cdf(value / stddev)) < 0.05


def clipped_with_outputs():
    """A sum and the values of single examples, which the noise does not cover."""
    grad_fn = clipped_grad(
        lambda params, x: jnp.sum(params * x), l2_clip_norm=1.0, return_values=True
    )
    return grad_fn(jnp.ones(3), jnp.ones((2, 3)))


EXACT = GridArray(np.arange(4, dtype=np.int32), 1.0)
ZEROS = np.zeros(3, np.float32)


@pytest.mark.parametrize(
    ("message", "make_total", "options"),
    [
        # Neighbours such as 259 and 260 may be 258 and 260 in bfloat16.
        *(
            (r"at least 32 bits until noise.*got leaf=1", lambda x=x: [ZEROS, x], {})
            for x in (np.ones(3, jnp.bfloat16), np.ones(3, np.float16))
        ),
        (
            "real float array; got leaf=1",
            lambda: [ZEROS, np.zeros(3, np.complex64)],
            {},
        ),
        ("at most 67 million units", lambda: zeros_on_grid(2.0**-27, 3), {}),
        *(
            ("a stddev from 1e-24 to 1e30", lambda: ZEROS, {"stddev": stddev})
            for stddev in (1e-25, 1e31)
        ),
        *(
            ("must stay int32 until noise", lambda x=x: jax.tree.map(x, EXACT), {})
            for x in (lambda x: x / 2, lambda x: x.astype(jnp.bfloat16), jnp.mean)
        ),
        (r"to the sum alone.*Pass the first part", clipped_with_outputs, {}),
    ],
)
def test_sums_that_noise_does_not_hide_are_refused(message, make_total, options):
    privatizer = make_privatizer(**options)
    with pytest.raises(ValueError, match=message):
        privatizer.update(make_total(), privatizer.init(None))


def test_float_sums_of_too_many_entries_are_refused():
    with pytest.raises(ValueError, match="noise must have at most 67 million units"):
        chosen(abstract(10**17), stddev=1.999)


def test_without_a_key_init_is_refused_under_jit():
    with pytest.raises(ValueError, match=r"must be drawn outside of jax\.jit"):
        jax.jit(gaussian_privatizer(stddev=1.0).init)(jnp.zeros(3))
    assert jax.jit(make_privatizer().init)(jnp.zeros(3)).step == 0
