"""What do clipping and summing cost, next to jax_privacy on the same model?

Quoted are ratios of time within rounds, and of the temporary memory of the compiled
programs, for both libraries' `clipped_grad` (vmap engine). jax_privacy runs with
`dtype=float32`, which makes its norms and sums float32, and as it is by default. The
plain gradient of the mean loss is there for scale.

    python -m benchmarks.clipping        # five minutes on two cores
"""

from typing import Annotated

import jax
import jax.numpy as jnp

from benchmarks import harness, models

TASKS = {"mlp": models.mlp, "transformer": models.transformer}


def benchmark(
    task: Annotated[str, harness.Each(TASKS)],
    dtype: Annotated[str, harness.Each(models.DTYPES)],
    rounds: int = 15,
) -> harness.Lines:
    """A line for each model, dtype and microbatch size."""
    made = TASKS[task](models.DTYPES[dtype])
    for size in (None, 16):
        others = {
            "jax_privacy, float32": made.theirs(
                microbatch_size=size, dtype=jnp.float32
            ),
            "jax_privacy, default": made.theirs(microbatch_size=size),
            "plain gradient": jax.grad(made.loss_fn),
        }
        functions = {"dpmp": made.clipped_grad(microbatch_size=size), **others}
        measured = harness.measure(functions, made.args, rounds)
        yield {
            "microbatch_size": size,
            **measured.figures("plain gradient"),
            "time_ratio": {x: measured.ratio("dpmp", x) for x in others},
            "memory_ratio": {x: measured.memory_over(x)["dpmp"] for x in others},
        }


if __name__ == "__main__":
    harness.main(benchmark, tiny={"task": ["mlp"], "rounds": 1})
