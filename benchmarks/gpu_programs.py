"""What would a GPU be asked to run? Programs compiled for one, without one.

Compiles clipped sums for an NVIDIA H100 on a machine that need not have any GPU, and
says how their temporary memory and compile seconds relate to those of plain training
(`jax.grad` of the mean loss), for the models of `book_keeping.py`. Time is not in it.
`h100.py` says what has to be installed. The programs of `gpu` are compiled by
`python -m benchmarks.gpu --compile-only`.

    python -m benchmarks.gpu_programs        # eight minutes on two cores
"""

import functools
import time
from collections.abc import Callable
from typing import Annotated, Any

from benchmarks import h100  # before jax

# isort: split
import jax

from benchmarks import harness, models


def contenders(task: models.Task) -> dict[str, Callable[..., Any]]:
    """Functions of (params, batch), by name."""
    kept = functools.partial(task.clipped_grad, method="book_keeping")
    return {
        "plain": jax.grad(task.loss_fn),
        "book-keeping, at once": kept(arithmetic="unproved_float32"),
        "book-keeping, 8": kept(microbatch_size=8, arithmetic="unproved_float32"),
        "book-keeping, bounded, 8": kept(microbatch_size=8),
        "per example, 8": task.clipped_grad(microbatch_size=8),
    }


def measure(task: models.Task) -> dict[str, dict[str, float]]:
    """Megabytes and seconds of all contenders, and ratios to the plain gradient."""
    megabytes, seconds, functions = {}, {}, contenders(task)
    for name, fun in [*functions.items()] * 2:  # the first time fills caches of jax
        start = time.perf_counter()
        args = h100.place(task.args)
        program: Any = jax.jit(lambda *xs, fun=fun: fun(*xs)).lower(*args).compile()
        seconds[name] = time.perf_counter() - start
        megabytes[name] = program.memory_analysis().temp_size_in_bytes / 1e6
    return {
        "temp_megabytes": harness.rounded(megabytes, 1),
        "memory_ratio": harness.rounded(megabytes, 3, unit=megabytes["plain"]),
        "compile_seconds": harness.rounded(seconds, 1),
        "compile_ratio": harness.rounded(seconds, 3, unit=seconds["plain"]),
    }


def benchmark(
    task: Annotated[str, harness.Each(models.SUBJECTS, models.TASKS)],
    dtype: Annotated[str, harness.Each(models.DTYPES)],
) -> harness.Lines:
    """A line for each model and dtype."""
    made = models.SUBJECTS[task].make(models.DTYPES[dtype], 64)
    kind, question = h100.device_kind(), {"question": "memory", "batch_size": 64}
    yield {"compiled_for": kind, **question, **measure(made)}


if __name__ == "__main__":
    harness.main(benchmark, tiny={"task": ["tiny"], "dtype": ["bfloat16"]})
