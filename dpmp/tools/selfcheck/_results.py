"""What self-checks give: measured values and their limits, and how much is measured."""

import math
from dataclasses import dataclass
from fractions import Fraction

from dpmp.tools.selfcheck._subjects import Keys, Releases, Sums


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
    num_leaves: int = 1000
    largest_batch: int = 4096
    num_training: int = 2**23
    num_test: int = 2**20


def compare_to_limits(
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
