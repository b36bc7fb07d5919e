from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from dpmp import _fence
from dpmp.numerics import _float_sums, reduction
from dpmp.numerics._arithmetic import parse_arithmetic


@pytest.mark.parametrize(
    ("batch_size", "microbatch_size"), [(64, 64), (64, 8), (64, 1), (6, 3)]
)
def test_rounding_slack_covers_twice_the_errors_of_all_additions(
    batch_size, microbatch_size
):
    arithmetic = parse_arithmetic("float32")
    slack = _float_sums.reserve_needed(arithmetic, batch_size, microbatch_size)
    num_microbatches = batch_size // microbatch_size
    below = num_microbatches * reduction.summed_norms(microbatch_size)
    below += sum(microbatch_size * (i + 1) for i in range(1, num_microbatches))
    assert slack >= 2 * arithmetic.unit_roundoff * below


def _stacked(*leaves):
    stack, _ = _fence.compute_and_store(lambda: (list(leaves), None), jnp.ones(1))
    return reduction.squared_norm(stack)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(1, np.float32), (33, jnp.bfloat16), (4097, np.float32), (140_001, jnp.bfloat16)],
)
def test_squared_norms_are_within_their_number_of_roundings(dtype, size):
    # Equal entries: the order of a sum, and all of its errors, have one direction.
    x = np.full((1, size), 1.0 / 3, dtype)
    norm = jax.jit(lambda: _stacked(x))()
    exact = reference.exact_squared_norm(x)
    u = Fraction(reduction.UNIT_ROUNDOFF)
    error = abs(Fraction(float(norm.value[0])) / exact - 1)
    assert error <= (1 + u) ** int(norm.roundings) - 1
    assert norm.value.dtype == jnp.float32


def test_squares_of_sixteen_bit_floats_count_no_rounding():
    counts = []
    for dtype in (np.float32, jnp.bfloat16):
        x = jax.ShapeDtypeStruct((1, 7), dtype)
        jax.eval_shape(lambda x: counts.append(_stacked(x).roundings), x)
    assert counts[0] == counts[1] + 1


def test_the_number_of_entries_bounds_what_is_flushed_to_zero():
    x = jnp.full((1, 5000), 1e-23, jnp.float32)
    norm = jax.jit(lambda: _stacked(x))()
    assert norm.num_entries == 5000
    upper_bound = Fraction(float(norm.value[0])) + 5000 * Fraction(1, 2**126)
    assert upper_bound >= reference.exact_squared_norm(x) > float(norm.value[0])
