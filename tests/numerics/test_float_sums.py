from fractions import Fraction

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from dpmp.numerics._double_words import DoubleWord

from dpmp.numerics import (
    _double_words,
    _float_sums,
    _reduction,
    _squared_norms,
    _stored,
)
from dpmp.numerics._arithmetic import parse

_U = Fraction(_float_sums.UNIT_ROUNDOFF)


@pytest.mark.parametrize(
    ("batch_size", "microbatch_size"), [(64, 64), (64, 8), (64, 1), (6, 3)]
)
def test_rounding_slack_covers_twice_the_errors_of_all_additions(
    batch_size, microbatch_size
):
    arithmetic = parse("float32")
    slack = _float_sums.rounding_slack(arithmetic, batch_size, microbatch_size)
    num_microbatches = batch_size // microbatch_size
    below = num_microbatches * _reduction.summed_norms(microbatch_size)
    below += sum(microbatch_size * (i + 1) for i in range(1, num_microbatches))
    assert slack >= 2 * arithmetic.unit_roundoff * below


def test_rounding_slack_of_one_example_is_zero():
    for name in ("float32", "float32x2"):
        arithmetic = parse(name)
        assert _float_sums.rounding_slack(arithmetic, 1, 1) == 0


def test_wider_accumulators_have_a_negligible_slack():
    arithmetic = parse("float32x2")
    assert _float_sums.rounding_slack(arithmetic, 2**16, 2**16) < 1e-7


_finite = st.floats(-(2.0**40), 2.0**40, width=32, allow_subnormal=False)
_tiny_bits = st.floats(-1.0, 1.0, width=32, allow_subnormal=False)


@st.composite
def _pairs(draw, num=64):
    """Sums of a word and at most half a unit in its last place, of mixed sizes."""
    his = np.float32(draw(st.lists(_finite, min_size=num, max_size=num)))
    shares = np.float32(draw(st.lists(_tiny_bits, min_size=num, max_size=num)))
    his = np.where(np.abs(his) < 2.0**-40, np.float32(0), his)
    los = (np.abs(his) * np.float32(2.0**-25) * shares).astype(np.float32)
    los = np.where(np.abs(los) < 2.0**-90, np.float32(0), los)
    return DoubleWord(his, los)


@hypothesis.given(_pairs(), _pairs(), st.booleans())
def test_compiled_double_word_addition_keeps_its_error_bound(x, y, cancels):
    if cancels:  # leaves what the low words hold
        y = DoubleWord(-x.hi, y.lo * np.float32(2.0**-10))
        y = DoubleWord(*_fast_two_sum(y.hi, np.where(x.hi == 0, 0, y.lo)))
    _assert_within_error_bound(_double_words.add(x, y), x, y)


def _fast_two_sum(a, b):
    a, b = np.float32(a), np.float32(b)
    s = a + b
    keep = np.abs(b) <= np.abs(a)
    return np.where(keep, s, a), np.where(keep, b - (s - a), np.float32(0))


def _assert_within_error_bound(total, x, y):
    bound = 3 * _U**2 + 13 * _U**3
    exact = reference.exact_values(x) + reference.exact_values(y)
    error = reference.exact_values(total) - exact
    for e, value in zip(error, exact, strict=True):
        assert abs(e) <= bound * abs(value)


def test_double_word_addition_keeps_its_error_bound_uncompiled():
    rng = np.random.default_rng(0)
    his = rng.normal(size=(2, 300)).astype(np.float32)
    los = (his * rng.uniform(-(2.0**-25), 2.0**-25, his.shape)).astype(np.float32)
    x, y = (DoubleWord(*words) for words in zip(his, los, strict=True))
    with jax.disable_jit():
        _assert_within_error_bound(_double_words.add(x, y), x, y)


def test_double_word_sums_are_renormalised():
    x = DoubleWord(jnp.float32(1.0), jnp.float32(2.0**-25))
    total = _double_words.add(x, x)
    assert (total.hi, total.lo) == (2.0, 2.0**-24)


@hypothesis.given(
    *[hypothesis.extra.numpy.arrays(np.float32, 64, elements=_finite)] * 2
)
def test_two_sum_is_exact(a, b):
    s, error = jax.jit(_double_words.two_sum)(a, b)
    np.testing.assert_array_equal(s, a + b)
    exact = reference.exact_values(a) + reference.exact_values(b)
    assert all(reference.exact_values(s) + reference.exact_values(error) == exact)


def _stacked(*leaves):
    stack, _ = _stored.compute_and_store(lambda: (list(leaves), None), jnp.ones(1))
    return _squared_norms.squared_norm(stack)


@pytest.mark.parametrize("size", [1, 33, 4096, 4097, 20_000])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_squared_norms_are_within_their_number_of_roundings(dtype, size):
    # Equal entries: the order of a sum, and all of its errors, have one direction.
    x = jnp.full((1, size), 1.0 / 3, dtype)
    norm = jax.jit(lambda: _stacked(x))()
    exact = reference.exact_squared_norm(x)
    u = Fraction(_float_sums.UNIT_ROUNDOFF)
    error = abs(Fraction(float(norm.value[0])) / exact - 1)
    assert error <= (1 + u) ** int(norm.roundings) - 1
    assert norm.value.dtype == jnp.float32


def test_squares_of_sixteen_bit_floats_count_no_rounding():
    x = jnp.ones((1, 7))
    assert _stacked(x).roundings == _stacked(x.astype(jnp.bfloat16)).roundings + 1


def test_the_number_of_entries_bounds_what_is_flushed_to_zero():
    x = jnp.full((1, 5000), 1e-23, jnp.float32)
    norm = jax.jit(lambda: _stacked(x))()
    assert norm.num_entries == 5000
    upper_bound = Fraction(float(norm.value[0])) + 5000 * Fraction(1, 2**126)
    assert upper_bound >= reference.exact_squared_norm(x) > float(norm.value[0])


def test_float64_norms_are_float64():
    with jax.enable_x64(True):
        x = jnp.full((1, 3), 1e-30, jnp.float64)
        norm = _stacked(x, jnp.zeros((1, 2), jnp.bfloat16))
        assert norm.value.dtype == jnp.float64
        assert norm.value[0] > 0
