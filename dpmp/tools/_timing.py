"""Times functions in turn, and compares them.

Anything that slows the machine down for a while slows all functions, since they run
round by round. So times are compared within a round, and the median of the ratios
counts.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Name = TypeVar("Name")


def in_turn(
    functions: Mapping[Name, Callable[..., Any]], rounds: int, *args: Any
) -> dict[Name, list[float]]:
    """Seconds for each function in each round, after a round that is not counted."""
    seconds: dict[Name, list[float]] = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*args))
            seconds[name].append(time.perf_counter() - start)
    # The first round touches memory anew.
    return {name: times[1:] for name, times in seconds.items()}


def median_ratio(seconds: Sequence[float], reference: Sequence[float]) -> float:
    """The median of the ratios within a round."""
    pairs = zip(seconds, reference, strict=True)
    return statistics.median(a / b for a, b in pairs)


def compiled(fn: Callable[..., Any], *args: Any) -> jax.stages.Compiled:
    """Compiles any callable for these arguments."""
    return jax.jit(lambda *args: fn(*args)).lower(*args).compile()


def as_arrays(tree: Any) -> Any:
    """Replaces every `jax.ShapeDtypeStruct` in a tree by zeros."""

    def fill(x: Any) -> Any:
        is_shape = isinstance(x, jax.ShapeDtypeStruct)
        return jnp.zeros(x.shape, x.dtype) if is_shape else x

    return jax.tree.map(fill, tree)
