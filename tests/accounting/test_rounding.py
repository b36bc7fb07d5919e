import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpmp.accounting._rounding import digits_above, digits_below, round_up


@given(st.floats(1e-300, 1e300), st.integers(1, 8))
def test_few_digits_are_on_their_side_and_close(x, num_digits):
    above, below = (float(f(x, num_digits)) for f in (digits_above, digits_below))
    assert below <= x <= above
    assert above - below <= 10.0 ** (1 - num_digits) * 1.01 * x


@given(st.floats(1e-300, 1e300))
def test_epsilon_is_rounded_up(epsilon):
    assert (
        epsilon
        <= float(round_up(epsilon))
        <= epsilon + 0.001 * (1 + 1e-9) + (1e-15 * epsilon)
    )


@pytest.mark.parametrize("x", [1e-5, 0.5, 3e-7, 123.0])
def test_what_has_few_digits_is_left_as_it_was_written(x):
    assert float(digits_above(x, 3)) == float(digits_below(x, 3)) == x


def test_an_infinite_epsilon_is_shown_as_such():
    assert round_up(math.inf) == "inf"
