"""What do clipping and summing cost, next to jax_privacy on the same model?

Quoted are ratios of time, as `timing.py` takes them, and of the temporary memory of the
compiled programs, for both libraries' `clipped_grad` (vmap engine). jax_privacy runs
with `dtype=float32`, which makes its norms and sums float32, and as it is by default.
The plain gradient of the mean loss is there for scale.

    python -m benchmarks.clipping        # five minutes on two cores

Every line is appended to benchmarks/results/clipping.jsonl.
"""

import argparse
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import dpmp
from benchmarks import models, peers, results, timing

TASKS = {"mlp": models.mlp, "transformer": models.transformer}
DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}


def contenders(
    task: models.Task, microbatch_size: int | None
) -> dict[str, Callable[..., Any]]:
    """Functions of (params, batch), by name; all but the last clip."""
    clip = functools.partial(
        peers.jax_privacy_clipped_grad(),
        task.loss_fn,
        l2_clip_norm=1.0,
        microbatch_size=microbatch_size,
    )
    return {
        "dpmp": dpmp.clipped_grad(
            task.loss_fn, l2_clip_norm=1.0, microbatch_size=microbatch_size
        ),
        "jax_privacy, float32": clip(dtype=jnp.float32),
        "jax_privacy, default": clip(),
        "plain gradient": jax.grad(task.loss_fn),
    }


def summarize(measured: dict[str, timing.Measured]) -> dict[str, dict[str, float]]:
    """Median ratios of dpmp to the others, and the memory of all."""
    ours = measured["dpmp"]
    others = {name: m for name, m in measured.items() if name != "dpmp"}
    return {
        "milliseconds": {name: timing.median_ms(m) for name, m in measured.items()},
        "temp_megabytes": {
            name: round(m.temp_bytes / 1e6, 1) for name, m in measured.items()
        },
        "time_ratio": {name: timing.time_ratio(ours, m) for name, m in others.items()},
        "memory_ratio": {
            name: timing.memory_ratio(ours, m) for name, m in others.items()
        },
    }


def main() -> None:
    """Runs all combinations and appends their figures."""
    parser = argparse.ArgumentParser(
        description="Compares clipped_grad to jax_privacy."
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--task", choices=TASKS, nargs="*", default=list(TASKS))
    args = parser.parse_args()
    for name, dtype, microbatch_size in itertools.product(
        args.task, DTYPES, (None, 16)
    ):
        task = TASKS[name](DTYPES[dtype])
        measured = timing.measure(
            contenders(task, microbatch_size), (task.params, task.batch), args.rounds
        )
        results.append(
            "clipping",
            task=name,
            dtype=dtype,
            microbatch_size=microbatch_size,
            rounds=args.rounds,
            **summarize(measured),
        )


if __name__ == "__main__":
    main()
