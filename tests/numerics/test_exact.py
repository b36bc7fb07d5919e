"""The integers are the ground truth, and are compared to floats only to be close."""

import functools
import math
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from programs import equations

from dpmp._fence import StoredArray
from dpmp.clipping import _clip_norms, clipped_fun
from dpmp.numerics import ExactSums, _exact, reduction
from dpmp.numerics._grid import DEFAULT_RESOLUTION, LARGEST_RESOLUTION

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


@functools.cache
def _exact_sum_fn(resolution=DEFAULT_RESOLUTION, **kwargs):
    kwargs = {"l2_clip_norm": 1.0, "arithmetic": ExactSums(resolution), **kwargs}
    return clipped_fun(lambda x: x, keep_batch_dim=False, **kwargs)


@functools.cache
def _compiled_sum_fn(**kwargs):
    return jax.jit(_exact_sum_fn(**kwargs).__call__)


def _exact_sum(batch, *, is_padding_example=None, **kwargs):
    """The sum of the clipped rows of a batch, compiled."""
    if is_padding_example is None:
        is_padding_example = np.zeros(len(jax.tree.leaves(batch)[0]), bool)
    return _compiled_sum_fn(**kwargs)(batch, is_padding_example=is_padding_example)


# One contribution.


@hypothesis.given(
    seed=st.integers(0, 2**32 - 1),
    log_scale=st.floats(-30, 10),
    program=st.sampled_from(
        [
            (1, jnp.float32, LARGEST_RESOLUTION),
            (17, jnp.float16, 1000),
            (600, jnp.bfloat16, DEFAULT_RESOLUTION),
            (5000, jnp.bfloat16, LARGEST_RESOLUTION),
        ]
    ),
)
def test_a_contribution_has_at_most_the_resolution(seed, log_scale, program):
    size, dtype, resolution = program
    rng = np.random.default_rng(seed)
    x = np.float32(rng.normal(0, 10.0**log_scale, (1, size)))
    with np.errstate(over="ignore"):
        total = _exact_sum(x.astype(dtype), resolution=resolution)
    assert total.counts.dtype == jnp.int32
    assert reference.exact_squared_norm(total.counts) <= resolution**2


@pytest.mark.parametrize(
    ("resolution", "dtype"),
    [(1000, jnp.bfloat16), (2**17 + 1, np.float32), (LARGEST_RESOLUTION, jnp.float16)],
)
def test_a_contribution_is_close_to_what_was_clipped(resolution, dtype):
    # What is kept free for rounding: see ExactSums.max_norm_before_rounding.
    shrinkage = 1 - math.sqrt(1 - (1200 / 4 + 6 * resolution) / resolution**2)
    for x in (np.ones((1, 1200), dtype), 3 * np.eye(1, 1200, dtype=np.float32)):
        total = _exact_sum(x.astype(dtype), resolution=resolution)
        clipped = np.asarray(x[0], float) / np.linalg.norm(np.asarray(x[0], float))
        error = np.abs(np.asarray(total.counts, float) * total.unit - clipped)
        assert np.all(error <= total.unit * 1.01 + (shrinkage + 1e-5) * np.abs(clipped))
        norm = reference.norm(total.counts)
        assert norm >= resolution * (1 - 2 * shrinkage) - 2


def test_gradients_of_equal_entries_are_not_lost():
    # Rounded all in one direction, they would fail the check, or vanish.
    for num_equal in range(40, 60):
        x = np.float32(np.arange(5000) % 97 < num_equal)[None]
        norm = reference.norm(_exact_sum(x, resolution=500).counts)
        assert 0.98 * math.sqrt(500**2 - 5000 / 4 - 3000) <= norm <= 500


@pytest.fixture
def multiply_coefficients(monkeypatch):
    """A function that makes the floats before the check wrong, by a factor."""
    right = _clip_norms.coefficients

    def multiply(factor):
        def wrong(*args):
            return [factor * coef for coef in right(*args)]

        monkeypatch.setattr(_clip_norms, "coefficients", wrong)
        _compiled_sum_fn.cache_clear()

    yield multiply
    _compiled_sum_fn.cache_clear()


@pytest.mark.parametrize(
    ("factor", "resolution"),
    [(1.01, DEFAULT_RESOLUTION), (1e30, 1000), (math.nan, LARGEST_RESOLUTION)],
)
def test_what_exceeds_the_radius_contributes_zero(
    multiply_coefficients, factor, resolution
):
    multiply_coefficients(factor)
    x = np.float32(np.random.default_rng(0).normal(size=(1, 700)))
    assert not np.any(_exact_sum(x, resolution=resolution).counts)


@pytest.mark.parametrize("size", [2, 70_000])
def test_the_check_is_exact(size):
    max_norms = (3, 2**15 - 1, 2**15, LARGEST_RESOLUTION)
    given = [_rows_near(max_norm, size) for max_norm in max_norms]

    @jax.jit
    def are_within(given):
        stacks = [StoredArray(x, jnp.dtype(jnp.float32), (size,)) for x in given]
        pairs = zip(stacks, max_norms, strict=True)
        return [
            _exact._has_norm_at_most([x], jnp.ones(6), max_norm)
            for x, max_norm in pairs
        ]

    for rows, max_norm, found in zip(given, max_norms, are_within(given), strict=True):
        squares = [sum(int(q) ** 2 for q in row[row != 0]) for row in rows]
        expected = [square <= max_norm**2 for square in squares]
        assert expected[:5] == [True, False, True, False, False]
        assert found.tolist() == expected


@pytest.mark.parametrize("size", [700, 70_000])
def test_the_check_sees_the_integers_that_are_added(size):
    """Their thresholds depend on positions, also where the check cuts rows in parts."""
    rng = np.random.default_rng(0)
    rows = rng.uniform(-9, 9, (3, size)).astype(np.float32)
    coefs = np.float32([0.7, 1.0, 1.3])

    @jax.jit
    def both(rows, coefs, zero):
        stack = [StoredArray(rows, jnp.dtype(jnp.float32), (size,))]
        squares = _exact._SQUARES_IN_32_BITS
        total, _ = reduction.sum_entries(stack, squares, squares.add, coefs)
        contribution = functools.partial(ExactSums().contribution, zero=zero)
        return total, jax.vmap(contribution)(rows, coefs)

    checked, added = both(rows, coefs, np.uint32(0))
    assert checked.tolist() == np.sum(np.int64(added) ** 2, axis=1).tolist()


def _rows_near(max_norm, size):
    # All of the max_norm but what some ones make up for.
    num_ones = min(size - 1, 2 * max_norm - 1)
    largest = math.isqrt(max_norm**2 - num_ones)
    assert largest**2 + num_ones <= max_norm**2 < (largest + 1) ** 2 + num_ones
    row = np.zeros(size, np.float32)
    row[0], row[1 : num_ones + 1] = largest, -1
    too_many = np.array(row)
    too_many[0] += 1
    vast = np.full(size, 3e9, np.float32)
    wrapping = np.full(size, 2**16, np.float32)  # whose squares are 0 modulo 2^32
    return np.stack([row, too_many, -row, -too_many, vast, wrapping])


def test_a_contribution_of_many_leaves_is_checked_as_one(multiply_coefficients):
    tree = {str(i): jnp.ones((1, 3), _DTYPES[i % 3]) for i in range(6)}

    def squared_norm():
        total = _exact_sum(tree)
        return reference.exact_squared_norm([x.counts for x in total.values()])

    assert 0.99 * DEFAULT_RESOLUTION**2 <= squared_norm() <= DEFAULT_RESOLUTION**2
    # Each of the leaves is within the max_norm still.
    multiply_coefficients(2.0)
    assert squared_norm() == 0


# Groups, divisors and limits.


@hypothesis.given(
    norms=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30),
    resolution=st.integers(1, LARGEST_RESOLUTION),
)
def test_the_radii_of_all_groups_have_at_most_the_resolution(norms, resolution):
    total = math.hypot(*norms)
    grid = _exact.ExactSums(resolution).for_clip_norms(norms, total)
    assert sum(r**2 for r in grid.max_norms) <= resolution**2
    for max_norm, norm in zip(grid.max_norms, norms, strict=True):
        assert abs(max_norm - resolution * norm / total) <= 1 + 1e-9 * resolution
    assert Fraction(grid.unit) * resolution <= Fraction(total) * (
        1 + Fraction(1, 2**52)
    )
    assert grid.unit * resolution >= total * (1 - 2.0**-22)


@pytest.mark.parametrize(
    ("l2_clip_norm", "rescale", "normalize_by", "bound"),
    [(2.0, False, 8.0, 0.25), (0.0, True, 8.0, 0.125)],
)
def test_divisors_are_in_the_unit(l2_clip_norm, rescale, normalize_by, bound):
    total = _exact_sum(
        np.ones((1, 40), np.float32),
        l2_clip_norm=l2_clip_norm,
        rescale_to_unit_norm=rescale,
        normalize_by=normalize_by,
    )
    assert bound * (1 - 2.0**-22) <= total.unit * DEFAULT_RESOLUTION <= bound
    assert reference.norm(total.counts) >= 0.999 * DEFAULT_RESOLUTION


@pytest.mark.filterwarnings("ignore:sums can exceed 32 bits")
def test_wrapping_around_leaves_the_sensitivity_as_it_is():
    x = np.ones((600, 1), np.float32)
    with_one = _exact_sum(x, resolution=LARGEST_RESOLUTION).counts
    without = _exact_sum(
        x, is_padding_example=np.arange(600) == 7, resolution=LARGEST_RESOLUTION
    ).counts
    assert np.all(with_one < 0)  # a sum of positive numbers
    change = int((with_one - without)[0])  # in 32 bits, as noise is added
    assert 0.999 * LARGEST_RESOLUTION <= change <= LARGEST_RESOLUTION


def test_ordinary_resolutions_need_no_64_bit_numbers():
    batch = [jnp.ones((16, 700), jnp.bfloat16), jnp.ones((16, 3), jnp.bfloat16)]
    jaxpr = jax.make_jaxpr(_exact_sum_fn().__call__)(batch).jaxpr
    names = {v.aval.dtype.name for eqn in equations(jaxpr) for v in eqn.outvars}
    assert "int32" in names
    assert not [name for name in names if "64" in name]
