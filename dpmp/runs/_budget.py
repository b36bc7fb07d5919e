"""Finds how many steps a budget allows, with few computations of epsilon."""

import bisect
import math
from collections.abc import Callable

from scipy import optimize


def most_steps(epsilon: Callable[[int], float], budget: float, wanted: int) -> int:
    """The largest number of steps, up to `wanted`, with an epsilon within the budget.

    Args:
      epsilon: computes epsilon after a number of steps; it should rise with it.
      budget: a positive number.
      wanted: a positive number.

    Returns:
      A number whose epsilon is at most the budget, while that of the next number is
      not. If no number has such an epsilon, 0.
    """
    known: dict[int, float] = {}

    def is_above(steps: int) -> bool:
        if steps not in known:
            known[steps] = epsilon(steps)
        return known[steps] > budget

    def excess(log_steps: float) -> float:
        steps = round(math.exp(log_steps))
        is_above(steps)
        # Infinities would stop the search.
        return math.log(min(max(known[steps] / budget, 1e-3), 1e3))

    if not is_above(wanted):
        return wanted
    if is_above(1):
        return 0
    # A computation can take a second, and halving alone would need many of them. The
    # logarithms of steps and epsilon are nearly proportional.
    optimize.brentq(excess, 0.0, math.log(wanted), xtol=1e-12, disp=False)
    low = max(steps for steps in known if not is_above(steps))
    high = min(steps for steps in known if steps > low)
    return low + bisect.bisect(range(low + 1, high), False, key=is_above)
