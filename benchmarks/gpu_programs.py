"""What would a GPU be asked to run? Programs compiled for one, without one.

Compiles clipped sums for an NVIDIA H100 on a machine that need not have any GPU, and
says how their temporary memory and compile seconds relate to those of plain training
(`jax.grad` of the mean loss), for the models of `book_keeping.py`. Time is not in it.
`h100.py` says what has to be installed. The programs of `gpu` are compiled by
`python -m benchmarks.gpu --compile-only`.

    python -m benchmarks.gpu_programs        # eight minutes on two cores
"""

import functools
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


def benchmark(
    task: Annotated[str, harness.Each(models.SUBJECTS, models.TASKS)],
    dtype: Annotated[str, harness.Each(models.DTYPES)],
) -> harness.Lines:
    """A line for each model and dtype."""
    made = models.SUBJECTS[task].make(models.DTYPES[dtype], 64)
    _, measured = harness.compile_all(contenders(made), h100.place(made.args))
    question = {"compiled_for": h100.device_kind(), "question": "memory"}
    yield {**question, "batch_size": 64, **measured.figures("plain")}


if __name__ == "__main__":
    harness.main(benchmark, tiny={"task": ["tiny"], "dtype": ["bfloat16"]})
