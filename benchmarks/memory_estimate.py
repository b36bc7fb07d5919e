"""How close is the estimate of a step's memory to what it is compiled to?

For models of `models.py`, in bfloat16 and float32, with either engine and without
privacy, at once and in microbatches of 8: `dpmp.memory.estimate_memory` over the total
that the compiler reports of the same step with Adam.

    python -m benchmarks.memory_estimate        # ten minutes on two cores
    python -m benchmarks.memory_estimate --task mlp cnn

Every line is appended to benchmarks/results/memory_estimate.jsonl.
"""

import argparse
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import models, results
from dpmp import memory

_SMALL = {"length": 128, "width": 256, "depth": 4, "heads": 4, "vocabulary": 256}

TASKS = {
    "mlp": models.mlp,
    "cnn": models.cnn,
    "lstm": models.lstm,
    "transformer, 3M": functools.partial(models.transformer, **_SMALL),
    "transformer, 3M, scan": functools.partial(models.transformer, **_SMALL, scan=True),
}
POLICIES = ("mixed_bfloat16", "float32")
METHODS = ("none", "per_example", "book_keeping")
BATCH_SIZE = 16


def measure(task: models.Task, **options: Any) -> dict[str, float]:
    """Megabytes, estimated and compiled."""
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (task.params, task.batch)
    )
    options = {"optimizer": optax.adam(1e-3), **options}
    estimate = memory.estimate_memory(task.loss_fn, *shapes, **options)
    compiled = memory.compiled_memory(task.loss_fn, *shapes, **options)
    return {
        "estimated_megabytes": round(estimate.total / 1e6, 1),
        "compiled_megabytes": round(compiled.total / 1e6, 1),
        "ratio": round(estimate.compare(compiled), 3),
    }


def main() -> None:
    """Measures what was asked for, and prints the ratios."""
    parser = argparse.ArgumentParser(description="Compares estimates of memory.")
    parser.add_argument("--task", nargs="+", choices=TASKS, default=[*TASKS])
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "sums might exceed")
    for name in args.task:
        task = TASKS[name](jnp.float32, BATCH_SIZE)
        for policy in POLICIES:
            for method in METHODS:
                for size in (None, 8):
                    is_float = method == "book_keeping" and size is None
                    figures = measure(
                        task,
                        policy=policy,
                        method=None if method == "none" else method,
                        microbatch_size=size,
                        # "bounded" sums need small microbatches.
                        arithmetic="unproved_float32" if is_float else None,
                    )
                    what = {
                        "task": name,
                        "policy": policy,
                        "method": method,
                        "microbatch_size": size,
                        "batch_size": BATCH_SIZE,
                    }
                    results.append("memory_estimate", **what, **figures)


if __name__ == "__main__":
    main()
