"""How long do programs of many arrays take to compile, next to jax_privacy's?

Models are as people write them, with 150 to 1,100 arrays. Counted and timed are, for
the sum of clipped gradients of a batch,

- lines: those of StableHLO beyond the plain gradient's, for each array of parameters;
- seconds: from the call of `jax.jit(...).lower` to the compiled program (medians over
  rounds in which every contender is compiled anew, one after the other), and ratios to
  jax_privacy with `dtype=float32`.

    python -m benchmarks.compile_time        # ten minutes on two cores
"""

import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from benchmarks import flax_models, harness, models


def scalars(batch_size: int = 32) -> models.Task:
    """1,100 arrays of a single number."""
    params = [jnp.full((), 0.5) for _ in range(1_100)]

    def loss_fn(params, batch):
        return jnp.mean((jnp.stack(params) @ batch.T) ** 2)

    return models.Task(loss_fn, params, jnp.ones((batch_size, 1_100)))


TASKS: dict[str, Callable[[], models.Task]] = {
    "40 layers of 128 x 128": lambda: models.square_layers(jnp.float32),
    "the same, batch of 512": lambda: models.square_layers(jnp.float32, 512),
    "transformer, 12 layers": lambda: flax_models.transformer(jnp.float32),
    "transformer, bfloat16": lambda: flax_models.transformer(jnp.bfloat16),
    "u-net": lambda: flax_models.unet(jnp.float32),
    "1,100 scalars": scalars,
    "tiny": lambda: models.square_layers(jnp.float32, 4, depth=2),
}


def contenders(task: models.Task) -> dict[str, Callable[..., Any]]:
    """Functions of (params, batch), by name."""
    size = min(len(jax.tree.leaves(task.batch)[0]), 32)
    return {
        "plain": jax.grad(task.loss_fn),
        "jax_privacy": task.theirs(dtype=jnp.float32),
        "float32": task.clipped_grad(arithmetic="float32"),
        "exact": task.clipped_grad(arithmetic="exact"),
        "book-keeping, bounded": task.clipped_grad(
            method="book_keeping", microbatch_size=size
        ),
    }


def build(fun: Callable[..., Any], *args: Any) -> dict[str, float]:
    """Lines of the program, and the seconds to lower and to compile it."""
    jax.clear_caches()
    start = time.perf_counter()
    lowered = jax.jit(lambda *xs: fun(*xs)).lower(*args)
    lowered_at = time.perf_counter()
    lowered.compile()
    compiled_at = time.perf_counter()
    return {
        "lines": lowered.as_text().count("\n"),
        "seconds_to_lower": lowered_at - start,
        "seconds_to_compile": compiled_at - lowered_at,
        "seconds": compiled_at - start,
    }


def measure(task: models.Task, rounds: int) -> dict[str, dict[str, float]]:
    """Lines and median seconds, and both in relation to other contenders."""
    functions, args = contenders(task), task.args
    built = [{k: build(f, *args) for k, f in functions.items()} for _ in range(rounds)]
    figures = {
        name: {
            what: round(statistics.median(x[name][what] for x in built), 2)
            for what in built[0][name]
        }
        for name in functions
    }
    for x in figures.values():
        more = x["lines"] - figures["plain"]["lines"]
        x["lines_per_array"] = round(more / len(jax.tree.leaves(task.params)), 1)
        x["time_ratio"] = round(x["seconds"] / figures["jax_privacy"]["seconds"], 2)
    return figures


def benchmark(
    task: Annotated[str, harness.Each(TASKS, [*TASKS][:-1])], rounds: int = 3
) -> harness.Lines:
    """A line for each model."""
    made = TASKS[task]()
    arrays = len(jax.tree.leaves(made.params))
    yield {"arrays": arrays, "figures": measure(made, rounds)}


if __name__ == "__main__":
    tiny = {"task": ["tiny"], "rounds": 1}
    harness.main(benchmark, times_compilation=True, tiny=tiny)
