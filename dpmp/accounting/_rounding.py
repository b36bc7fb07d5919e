"""Writes numbers of a privacy claim in few digits, without claiming too much."""

import decimal
import math
import sys

from dpmp._numbers import as_real

# The precision that holds every digit of any float.
_EVERY_DIGIT = sys.float_info.max_10_exp + 4


def round_up(epsilon: float) -> str:
    """Writes epsilon with three decimals, rounded up; infinity is "inf".

    >>> print(round_up(3.5021), round_up(math.inf))
    3.503 inf
    """
    epsilon = as_real(epsilon)
    if math.isinf(epsilon):
        return "inf"
    every_digit = decimal.Context(prec=_EVERY_DIGIT)
    return str(
        decimal.Decimal(epsilon).quantize(
            decimal.Decimal("0.001"), decimal.ROUND_CEILING, every_digit
        )
    )


def digits_above(x: float, num_digits: int) -> str:
    """Writes `x` with `num_digits` significant digits, rounded up.

    The float that is read from the text is not below `x`.

    >>> print(digits_above(1e-5, 3), digits_above(1.2341e-6, 3))
    1e-05 1.24e-06
    """
    return _digits(x, num_digits, decimal.ROUND_CEILING)


def digits_below(x: float, num_digits: int) -> str:
    """Writes `x` with `num_digits` significant digits, rounded down.

    The float that is read from the text is not above `x`.

    >>> print(digits_below(1.23456, 5))
    1.2345
    """
    return _digits(x, num_digits, decimal.ROUND_FLOOR)


def _digits(x: float, num_digits: int, rounding: str) -> str:
    # repr gives the shortest text for this float. The user who wrote 1e-5 meant
    # 0.00001, and not the float next to it.
    context = decimal.Context(prec=num_digits, rounding=rounding)
    return f"{float(context.create_decimal(repr(as_real(x)))):.{num_digits}g}"
