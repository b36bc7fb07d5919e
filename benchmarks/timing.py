"""Compiles functions, times them in turn (see `dpmp.tools._timing`), compares them."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from dpmp.tools import _timing


class Measured(NamedTuple):
    """What one contender takes.

    Attributes:
      seconds: in each round.
      temp_bytes: that the compiled program allocates besides arguments and results.
      compile_seconds: from tracing to the program, the second time: the first fills
        caches of jax.
    """

    seconds: list[float]
    temp_bytes: int
    compile_seconds: float


def measure(
    functions: dict[str, Callable[..., Any]], args: tuple[Any, ...], rounds: int
) -> dict[str, Measured]:
    """Compiles all functions, then runs them in turn.

    Args:
      functions: the contenders, by name.
      args: of every one; what one does not use is no part of its program.
      rounds: to time, after one that is not counted.

    Returns:
      What each of them takes.
    """
    programs, compile_seconds = {}, {}
    for name, f in [*functions.items()] * 2:
        start = time.perf_counter()
        programs[name] = jax.jit(lambda *args, f=f: f(*args)).lower(*args).compile()
        compile_seconds[name] = time.perf_counter() - start
    calls = {name: functools.partial(f, *args) for name, f in programs.items()}
    seconds = _timing.in_turn(calls, rounds)
    return {
        name: Measured(
            seconds[name],
            program.memory_analysis().temp_size_in_bytes,
            compile_seconds[name],
        )
        for name, program in programs.items()
    }


def median_ms(measured: Measured) -> float:
    """The median of the rounds, in milliseconds."""
    return round(1e3 * statistics.median(measured.seconds), 1)


def time_ratio(measured: Measured, reference: Measured) -> float:
    """The median of the ratios within a round."""
    return round(_timing.median_ratio(measured.seconds, reference.seconds), 3)


def memory_ratio(measured: Measured, reference: Measured) -> float:
    """The ratio of temporary memory; a program without any counts as one byte."""
    return round(measured.temp_bytes / max(reference.temp_bytes, 1), 3)


def compile_ratio(measured: Measured, reference: Measured) -> float:
    """The ratio of the seconds that compilation took."""
    return round(measured.compile_seconds / reference.compile_seconds, 1)


def fastest(measured: dict[str, Measured]) -> str:
    """The name of the one with the smallest median."""
    return min(measured, key=lambda name: statistics.median(measured[name].seconds))
