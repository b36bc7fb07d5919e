"""Times functions in turn, and compares them.

A machine that slows down for a while slows all functions of a round. So times are
compared within a round, and the result is the median ratio over all rounds.
"""

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

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
    # The first round is slower, because it touches its memory for the first time.
    return {name: times[1:] for name, times in seconds.items()}


def median_ratio(seconds: Sequence[float], reference: Sequence[float]) -> float:
    """The median of the ratios within a round."""
    pairs = zip(seconds, reference, strict=True)
    return statistics.median(a / b for a, b in pairs)


def measure(
    functions: Mapping[Name, Callable[..., Any]], rounds: int, *args: Any
) -> tuple[dict[Name, jax.stages.Compiled], dict[Name, list[float]]]:
    """Compiles functions, and times them in turn; shapes in `args` stand for zeros."""

    def fill(x: Any) -> Any:
        is_shape = isinstance(x, jax.ShapeDtypeStruct)
        return jnp.zeros(x.shape, x.dtype) if is_shape else x

    arrays = jax.tree.map(fill, args)
    programs = {
        name: jax.jit(lambda *args, fn=fn: fn(*args)).lower(*arrays).compile()
        for name, fn in functions.items()
    }
    calls = {name: functools.partial(x, *arrays) for name, x in programs.items()}
    return programs, in_turn(calls, rounds)
