"""Measures the time and the memory of a step for microbatches of several sizes.

Small microbatches need less memory, and on CPUs they are often faster too.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dpmp import _plain_text, _timing, _validate
from dpmp._typing import PyTree

__all__ = ["MicrobatchTimes", "measure_microbatch_sizes"]


@dataclass(frozen=True)
class MicrobatchTimes:
    """The measurements; `str` gives a table.

    Attributes:
      seconds: the median time of a call, by microbatch size.
      temporary_bytes: the memory that the compiled program allocates besides arguments
        and results; None if the compiler does not report it.
    """

    seconds: dict[int, float]
    temporary_bytes: dict[int, int | None]

    @property
    def best(self) -> int:
        """The fastest size."""
        return min(self.seconds, key=self.seconds.__getitem__)

    def __str__(self) -> str:
        rows = [["microbatch", "milliseconds", "temporary MB"]]
        for size, seconds in self.seconds.items():
            memory = self.temporary_bytes[size]
            megabytes = "unknown" if memory is None else f"{memory / 1e6:.1f}"
            rows.append([str(size), f"{1e3 * seconds:.1f}", megabytes])
        return _plain_text.table(rows, ">>>")


def measure_microbatch_sizes(
    make_fn: Callable[[int], Callable[..., PyTree]],
    *args: Any,
    sizes: Sequence[int] = (2, 8, 32),
    rounds: int = 3,
) -> MicrobatchTimes:
    """Times a function with several microbatch sizes, on this device.

    The best size depends on the model, the device and the compiler. With book-keeping,
    small microbatches often take less time as well as less memory.

    >>> from dpmp import clipped_grad
    >>> times = measure_microbatch_sizes(
    ...     lambda size: clipped_grad(
    ...         lambda w, x: jnp.mean((x @ w) ** 2),
    ...         l2_clip_norm=1.0,
    ...         method="book_keeping",
    ...         microbatch_size=size,
    ...     ),
    ...     jnp.zeros(8),
    ...     jax.ShapeDtypeStruct((16, 8), jnp.float32),
    ...     sizes=(4, 16),
    ... )
    >>> times.best in (4, 16)
    True

    Args:
      make_fn: a function from a microbatch size to the function that is timed.
      *args: the arguments of the timed function: arrays, or `jax.ShapeDtypeStruct` for
        zeros. Only shapes matter, so private data is not needed.
      sizes: the microbatch sizes, each a divisor of the batch size.
      rounds: the number of times that each function is timed, in turn.

    Raises:
      ValueError: if there are no sizes, if one is not a positive integer, or if a
        function refuses one.
    """
    _validate.require(
        len(sizes) > 0,
        "there must be at least one size",
        sizes=sizes,
        fix="Use (2, 8, 32).",
    )
    sizes = [
        _validate.positive_integer(size=size, fix="Use divisors of the batch size.")
        for size in sizes
    ]
    rounds = _validate.positive_integer(rounds=rounds, fix="Use 3.")
    functions = {size: make_fn(size) for size in sizes}
    programs, seconds = _timing.measure(functions, rounds, *args)
    analyses = {size: program.memory_analysis() for size, program in programs.items()}
    return MicrobatchTimes(
        {size: statistics.median(times) for size, times in seconds.items()},
        {size: x and x.temp_size_in_bytes for size, x in analyses.items()},
    )
