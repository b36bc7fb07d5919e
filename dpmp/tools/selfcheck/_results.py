"""The results of a self-check, and the sizes of its measurements."""

import math
from fractions import Fraction
from typing import Any, NamedTuple

Number = Fraction | float


class Result(NamedTuple):
    """A measured value and its limits.

    Attributes:
      measurement: the name of the measured quantity.
      subject: the library and the mode that were measured.
      is_claimed: whether dpmp promises that the value is within the limits.
      value: the value, rounded to float64.
      at_least: the lower limit, if there is one.
      at_most: the upper limit, if there is one.
      passed: whether the exact value is within the limits.
      worst_case: the data on which the value was measured.
    """

    measurement: str
    subject: str
    is_claimed: bool
    value: float
    at_least: float | None
    at_most: float | None
    passed: bool
    worst_case: str


class Sizes(NamedTuple):
    """The sizes of the measurements."""

    num_entries: int = 20_000  # of a gradient with one leaf
    num_leaves: int = 1000  # of a gradient with many
    largest_batch: int = 4096  # for which sums are compared
    num_training: int = 2**23  # noisy values of each sum that an attacker knows
    num_test: int = 2**20  # noisy values of each sum that the attacker tells apart


def compare(
    measurement: str,
    subject: Any,
    value: Number,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    worst_case: str = "",
    is_squared: bool = False,
) -> Result:
    """Compares a value, or the root of a square, to its limits, exactly.

    NaN is within no limits.
    """
    value = value if isinstance(value, Fraction) else float(value)
    power = 2 if is_squared else 1
    is_large = at_least is None or value >= Fraction(at_least) ** power
    is_small = at_most is None or value <= Fraction(at_most) ** power
    value = math.sqrt(value) if is_squared else float(value)
    claim = measurement, subject.name, subject.is_claimed
    passed = is_large and is_small
    return Result(*claim, value, at_least, at_most, passed, worst_case)
