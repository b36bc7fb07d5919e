"""How long a step takes, and what memory, for microbatches of several sizes.

`print(measure_microbatch_sizes(make_fn, *args))` times `make_fn(size)` for some
microbatch sizes, on this device. Small microbatches need less memory, and on CPUs they
are often faster too.
"""

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.tools import _timing

__all__ = ["MicrobatchTimes", "measure_microbatch_sizes"]


@dataclass(frozen=True)
class MicrobatchTimes:
    """What was measured; `str` gives a table.

    Attributes:
      seconds: the median time of a call, by microbatch size.
      temporary_bytes: what the compiled program allocates besides arguments and
        results; None where the compiler does not tell.
    """

    seconds: dict[int, float]
    temporary_bytes: dict[int, int | None]

    @property
    def best(self) -> int:
        """The fastest size."""
        return min(self.seconds, key=self.seconds.__getitem__)

    def __str__(self) -> str:
        rows = ["microbatch   milliseconds   temporary MB"]
        rows += [
            f"{size:10}   {1e3 * seconds:12.1f}   {_megabytes(memory):>12}"
            for (size, seconds), memory in zip(
                self.seconds.items(), self.temporary_bytes.values(), strict=True
            )
        ]
        return "\n".join(rows)


def measure_microbatch_sizes(
    make_fn: Callable[[int], Callable[..., PyTree]],
    *args: Any,
    sizes: Sequence[int] = (2, 8, 32),
    rounds: int = 3,
) -> MicrobatchTimes:
    """Times a function with several microbatch sizes, on this device.

    Smaller microbatches take less memory, and with book-keeping often less time; how
    small is best depends on model, device and compiler. Nothing is changed or chosen:
    it is up to the caller what to do with `.best`.

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
      make_fn: from a microbatch size to the function.
      *args: of the function: arrays, or `jax.ShapeDtypeStruct` for zeros. Shapes are
        all that matters; there is no need to show it private data.
      sizes: of microbatches, each a divisor of the batch size.
      rounds: how often each is timed, in turn.

    Returns:
      The times and the memory of all sizes.

    Raises:
      ValueError: for sizes that are not positive integers, or none; and as the
        functions do.
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
    arrays = jax.tree.map(_as_array, args)
    programs = {
        size: jax.jit(_as_function(make_fn(size))).lower(*arrays).compile()
        for size in sizes
    }
    seconds = _timing.in_turn(
        {
            size: functools.partial(program, *arrays)
            for size, program in programs.items()
        },
        rounds,
    )
    return MicrobatchTimes(
        {size: statistics.median(times) for size, times in seconds.items()},
        {size: _temporary_bytes(program) for size, program in programs.items()},
    )


def _temporary_bytes(program: Any) -> int | None:
    analysis = program.memory_analysis()
    return None if analysis is None else analysis.temp_size_in_bytes


def _megabytes(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 1e6:.1f}"


def _as_function(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    return lambda *args: fn(*args)


def _as_array(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jnp.zeros(x.shape, x.dtype)
    return x
