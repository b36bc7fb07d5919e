"""How long does it take to draw a Poisson batch, next to one random word an example?

Both ways draw batches of the same distribution. Measured are the seconds of one batch
(medians over rounds in which all contenders run in turn), the memory that is allocated
while it is drawn, and the seconds to build the table of the binomial distribution,
which happens once in a run.

    python -m benchmarks.sampling        # a minute on two cores
"""

import functools
import time
import tracemalloc
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from benchmarks import harness
from dpmp.batch_selection import PoissonSampling, _binomial

_KEY = 7
SETTINGS = (
    (60_000, 0.01),
    (10**6, 0.01),
    (10**6, 0.5),
    (10**8, 1e-4),
    (10**8, 1e-2),
    (10**9, 1e-9),
    (10**9, 1e-6),
    (10**9, 1e-4),
)
# Beyond that, one word an example would take 8 GB.
_LARGEST_FOR_A_WORD_EACH = 10**8


def a_word_for_each_example(num_examples: int, sampling_prob: float) -> np.ndarray:
    """Draws a batch in the time of the dataset."""
    words = np.random.Philox(_KEY).random_raw(num_examples)
    return np.flatnonzero(words < np.uint64(sampling_prob * 2**64))


def peak_megabytes(draw: Callable[[], Any]) -> float:
    """The most memory that is allocated at once while a batch is drawn."""
    tracemalloc.start()
    try:
        draw()
        return tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()


def benchmark(rounds: int = 5, settings: int = len(SETTINGS)) -> harness.Lines:
    """A line for each of the first settings."""
    for num_examples, sampling_prob in SETTINGS[:settings]:
        _binomial._table.cache_clear()
        start = time.perf_counter()
        _binomial._table(num_examples, Fraction(sampling_prob))
        seconds_for_table = time.perf_counter() - start
        draw = PoissonSampling(sampling_prob, 1).indices
        draws: dict[str, Callable[[], np.ndarray]] = {
            "dpmp": functools.partial(draw, 0, num_examples=num_examples, key=_KEY)
        }
        if num_examples <= _LARGEST_FOR_A_WORD_EACH:
            draws["a word for each example"] = functools.partial(
                a_word_for_each_example, num_examples, sampling_prob
            )
        yield {
            "num_examples": num_examples,
            "sampling_prob": sampling_prob,
            "table_seconds": seconds_for_table,
            "seconds": harness.in_turn(draws, rounds).medians(),
            "megabytes": {name: peak_megabytes(draw) for name, draw in draws.items()},
        }


if __name__ == "__main__":
    harness.main(benchmark, tiny={"rounds": 1, "settings": 1})
