"""What do clipping and summing cost, next to jax_privacy on the same model?

Quoted are ratios of time within rounds, and of the temporary memory of the compiled
programs, for both libraries' `clipped_grad` (vmap engine). jax_privacy runs with
`dtype=float32`, which makes its norms and sums float32, and as it is by default. The
plain gradient of the mean loss is there for scale.

    python -m benchmarks.clipping        # five minutes on two cores
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import dpmp
from benchmarks import harness, models

TASKS = {"mlp": models.mlp, "transformer": models.transformer}


def benchmark(task: Sequence[str], rounds: int) -> Iterator[dict[str, Any]]:
    """A line for each model, dtype and microbatch size."""
    from jax_privacy import clipping

    for name, dtype, size in itertools.product(task, models.DTYPES, (None, 16)):
        made = TASKS[name](models.DTYPES[dtype])
        options = {"l2_clip_norm": 1.0, "microbatch_size": size}
        theirs = functools.partial(clipping.clipped_grad, made.loss_fn, **options)
        functions = {
            "dpmp": dpmp.clipped_grad(made.loss_fn, **options),
            "jax_privacy, float32": theirs(dtype=jnp.float32),
            "jax_privacy, default": theirs(),
            "plain gradient": jax.grad(made.loss_fn),
        }
        measured = harness.measure(functions, (made.params, made.batch), rounds)
        others = [x for x in functions if x != "dpmp"]
        time, memory = (
            {x: over(x)["dpmp"] for x in others}
            for over in (measured.time_over, measured.memory_over)
        )
        yield {
            "task": name,
            "dtype": dtype,
            "microbatch_size": size,
            "rounds": rounds,
            "milliseconds": measured.milliseconds(),
            "temp_megabytes": measured.megabytes(),
            "time_ratio": time,
            "memory_ratio": memory,
        }


if __name__ == "__main__":
    harness.main(
        benchmark,
        tiny={"task": ["mlp"], "rounds": 1},
        task=harness.Some(TASKS),
        rounds=15,
    )
