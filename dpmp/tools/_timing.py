"""Times functions in turn, and compares them.

What slows the machine down for a while slows all of them, if they run round by round.
So time is compared within a round, and the median of the ratios taken.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

Name = TypeVar("Name")


def in_turn(
    functions: Mapping[Name, Callable[[], Any]], rounds: int
) -> dict[Name, list[float]]:
    """Seconds for each function in each round, after a round that is not counted."""
    seconds: dict[Name, list[float]] = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function())
            seconds[name].append(time.perf_counter() - start)
    # The first round touches memory anew.
    return {name: times[1:] for name, times in seconds.items()}


def median_ratio(seconds: Sequence[float], reference: Sequence[float]) -> float:
    """The median of the ratios within a round."""
    pairs = zip(seconds, reference, strict=True)
    return statistics.median(a / b for a, b in pairs)
