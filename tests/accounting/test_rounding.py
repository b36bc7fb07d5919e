import math
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpmp.accounting._rounding import digits_above, digits_below, round_up


@given(st.floats(1e-300, 1e300), st.integers(1, 8))
def test_few_digits_are_on_their_side_and_close(x, num_digits):
    above, below = (float(f(x, num_digits)) for f in (digits_above, digits_below))
    assert below <= x <= above
    assert above - below <= 10.0 ** (1 - num_digits) * 1.01 * x


@given(st.floats(min_value=0.0, allow_infinity=False))
def test_epsilon_is_rounded_up_by_less_than_a_thousandth(epsilon):
    excess = Fraction(round_up(epsilon)) - Fraction(epsilon)
    assert 0 <= excess < Fraction(1, 1000)


def test_three_decimals_are_shown():
    assert [round_up(x) for x in (0.0, 2.0001, math.inf)] == ["0.000", "2.001", "inf"]
    assert round_up(sys.float_info.max) == f"{int(sys.float_info.max)}.000"


@pytest.mark.parametrize("x", [1e-5, 123.0])
def test_what_has_few_digits_is_left_as_it_was_written(x):
    assert float(digits_above(x, 3)) == float(digits_below(x, 3)) == x
