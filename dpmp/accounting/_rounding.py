"""Writes numbers of a privacy claim in few digits, without claiming too much."""

import decimal
import math
import sys

from dpmp._validate import as_real

# This precision holds every digit of any float before the point, and three after it.
_EVERY_DIGIT = decimal.Context(sys.float_info.max_10_exp + 4, decimal.ROUND_CEILING)


def round_up(epsilon: float) -> str:
    """Writes epsilon with three decimals, rounded up; infinity is "inf".

    >>> print(round_up(3.5021), round_up(math.inf))
    3.503 inf
    """
    epsilon = as_real(epsilon)
    if math.isinf(epsilon):
        return "inf"
    thousandth = decimal.Decimal("0.001")
    return str(decimal.Decimal(epsilon).quantize(thousandth, context=_EVERY_DIGIT))


def digits_above(x: float, num_digits: int) -> str:
    """Writes `x` with few digits, so that the float read from them is not below `x`."""
    return _digits(x, num_digits, decimal.ROUND_CEILING)


def digits_below(x: float, num_digits: int) -> str:
    """Writes `x` with few digits, so that the float read from them is not above `x`."""
    return _digits(x, num_digits, decimal.ROUND_FLOOR)


def _digits(x: float, num_digits: int, rounding: str) -> str:
    # repr gives the shortest text for this float. The user who wrote 1e-5 meant
    # 0.00001, and not the float next to it.
    context = decimal.Context(prec=num_digits, rounding=rounding)
    return f"{float(context.create_decimal(repr(as_real(x)))):.{num_digits}g}"
