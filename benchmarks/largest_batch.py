"""What is the largest batch whose step fits into a given memory?

Programs for the sum of clipped gradients of a transformer are compiled for batches of
several sizes at once, and nothing is run. Counted is what the compiler says of
arguments, results and temporaries, which include the parameters, and not the optimizer.
In microbatches, any library takes a batch of any size: this is the largest microbatch.

    python -m benchmarks.largest_batch        # two minutes on two cores
"""

import functools
from collections.abc import Callable
from typing import Annotated, Any

import jax

from benchmarks import harness, models

_LARGEST = 2**16


def contenders(task: models.Task) -> dict[str, Callable[..., Any]]:
    """Functions of (params, batch), by name."""
    made = {
        "plain": jax.grad(task.loss_fn),
        "dpmp, book_keeping unproved_float32": task.clipped_grad(
            method="book_keeping", arithmetic="unproved_float32"
        ),
        "dpmp, per_example exact": task.clipped_grad(),
    }
    if harness.is_installed("jax_privacy"):
        made["jax_privacy"] = task.theirs()
    return made


def num_bytes(fun: Callable[..., Any], task: models.Task, size: int) -> int:
    """What the compiled program takes for a batch of some size."""
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), task.batch
    )
    memory: Any = jax.jit(fun).lower(task.params, shapes).compile().memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return held - memory.alias_size_in_bytes + memory.temp_size_in_bytes


def largest(bytes_of: Callable[[int], int], limit: float) -> int:
    """The largest batch that fits, to about one in fifty; 0 if none was found.

    Memory grows almost in proportion to the batch, so that a line through the last two
    sizes tells which to try next.
    """
    known = {size: bytes_of(size) for size in (8, 16)}
    for _ in range(4):
        (a, at_a), (b, at_b) = sorted(known.items())[-2:]
        slope = max((at_b - at_a) / (b - a), 1.0)
        guess = min(int(b + (limit - at_b) / slope), _LARGEST)
        if guess < 1 or guess in known:
            break
        known[guess] = bytes_of(guess)
        if abs(limit - known[guess]) < 0.02 * limit and known[guess] <= limit:
            break
    return max((size for size, x in known.items() if x <= limit), default=0)


def benchmark(
    task: Annotated[str, harness.Each(models.SUBJECTS, ["transformer, 17M"])],
    dtype: Annotated[str, harness.Each(models.DTYPES, ["bfloat16"])],
    gigabytes: float = 4.0,
) -> harness.Lines:
    """A line for each model and dtype."""
    made = models.SUBJECTS[task].make(models.DTYPES[dtype], 1)
    sizes = {
        name: largest(functools.partial(num_bytes, fun, made), 1e9 * gigabytes)
        for name, fun in contenders(made).items()
    }
    over_plain = harness.rounded(sizes, 3, unit=max(sizes["plain"], 1))
    yield {"largest_batch": sizes, "batch_over_plain": over_plain}


if __name__ == "__main__":
    harness.main(benchmark, tiny={"task": ["tiny"], "gigabytes": 0.002})
