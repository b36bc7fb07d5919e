"""What do clipping and summing cost, next to jax_privacy on the same model?

Both libraries' `clipped_grad` (vmap engine) are compiled, then run in turn, round by
round in one process; quoted are medians of the ratios within a round, and the temporary
memory of the compiled programs. jax_privacy runs with `dtype=float32`, which makes its
norms and sums float32, and as it is by default. The plain gradient of the mean loss is
there for scale.

    python benchmarks/clipping.py        # five minutes on two cores

Every line is appended to benchmarks/results/clipping.jsonl.
"""

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax_privacy.clipping
import models
import results

import dpmp

TASKS = {"mlp": models.mlp, "transformer": models.transformer}
DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}


def contenders(
    task: models.Task, microbatch_size: int | None
) -> dict[str, Callable[..., Any]]:
    """Functions of (params, batch), by name; all but the last clip."""
    clip = functools.partial(
        jax_privacy.clipping.clipped_grad,
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


def measure(
    functions: dict[str, Callable[..., Any]], task: models.Task, rounds: int
) -> dict[str, dict[str, Any]]:
    """Seconds in each round and temporary bytes of each contender."""
    args = (task.params, task.batch)
    programs = {
        name: jax.jit(lambda *args, f=f: f(*args)).lower(*args).compile()
        for name, f in functions.items()
    }
    seconds = {name: [] for name in programs}
    for _ in range(rounds + 1):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*args))
            seconds[name].append(time.perf_counter() - start)
    return {
        name: {
            "seconds": seconds[name][1:],  # the first round touches memory anew
            "temp_bytes": temporary_bytes(program),
        }
        for name, program in programs.items()
    }


def temporary_bytes(program: Any) -> int:
    """What the compiled program allocates besides arguments and results."""
    return program.memory_analysis().temp_size_in_bytes


def summarize(measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Median ratios of dpmp to the others, and the memory of all."""
    ours = measured["dpmp"]
    others = {name: m for name, m in measured.items() if name != "dpmp"}
    return {
        "milliseconds": {
            name: round(1e3 * statistics.median(m["seconds"]), 1)
            for name, m in measured.items()
        },
        "temp_megabytes": {
            name: round(m["temp_bytes"] / 1e6, 1) for name, m in measured.items()
        },
        "time_ratio": {
            name: round(
                statistics.median(
                    a / b for a, b in zip(ours["seconds"], m["seconds"], strict=True)
                ),
                3,
            )
            for name, m in others.items()
        },
        "memory_ratio": {
            name: round(ours["temp_bytes"] / m["temp_bytes"], 3)
            for name, m in others.items()
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
        measured = measure(contenders(task, microbatch_size), task, args.rounds)
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
