"""What would a GPU be asked to run? Programs compiled for one, without one.

Compiles steps for an NVIDIA H100 on a machine that need not have any GPU, and says

- temporary memory and compile seconds, of plain training's (`jax.grad` of the mean
  loss), for the models of `book_keeping.py`;
- by operands and result, how many of a step's products run in cuBLAS, and how many of
  them in float8: for the preset "float8" and "mixed_bfloat16".

Time is not in it. `h100.py` says what has to be installed. The programs of `gpu.py` are
compiled by `python -m benchmarks.gpu --compile-only`.

    python -m benchmarks.gpu_programs        # eight minutes on two cores

Every line is appended to benchmarks/results/gpu_programs.jsonl.
"""

import argparse
import collections
import functools
import itertools
import re
import time
from collections.abc import Callable
from typing import Any

from benchmarks import h100  # before jax

# isort: split
import jax
import jax.numpy as jnp

import dpmp
from benchmarks import models, results
from benchmarks.subjects import DTYPES, TASKS
from dpmp.programs import _float8

_WITH_CUBLAS = {"xla_gpu_enable_triton_gemm": False}


def contenders(task: models.Task) -> dict[str, Callable[..., Any]]:
    """Functions of (params, batch), by name."""
    clip = functools.partial(dpmp.clipped_grad, task.loss_fn, l2_clip_norm=1.0)
    kept = functools.partial(clip, method="book_keeping")
    return {
        "plain": jax.grad(task.loss_fn),
        "book-keeping, at once": kept(arithmetic="unproved_float32"),
        "book-keeping, 8": kept(microbatch_size=8, arithmetic="unproved_float32"),
        "book-keeping, bounded, 8": kept(microbatch_size=8),
        "per example, 8": clip(microbatch_size=8),
    }


def measure_memory(task: models.Task, sharding: Any) -> dict[str, dict[str, float]]:
    """Megabytes and seconds of all contenders, and ratios to the plain gradient."""
    megabytes, seconds = {}, {}
    functions = contenders(task)
    for name, fun in [*functions.items()] * 2:  # the first time fills caches of jax
        start = time.perf_counter()
        program = h100.compile_for(sharding, fun, task.params, task.batch)
        seconds[name] = time.perf_counter() - start
        megabytes[name] = program.memory_analysis().temp_size_in_bytes / 1e6
    return {
        "temp_megabytes": {k: round(v, 1) for k, v in megabytes.items()},
        "memory_ratio": _to_plain(megabytes),
        "compile_seconds": {k: round(v, 1) for k, v in seconds.items()},
        "compile_ratio": _to_plain(seconds),
    }


def _to_plain(figures: dict[str, float]) -> dict[str, float]:
    return {k: round(v / figures["plain"], 3) for k, v in figures.items()}


def count_products(
    task: models.Task, policy: dpmp.Policy, method: str, sharding: Any
) -> dict[str, int]:
    """How many products a clipped sum has, by the function of cuBLAS that runs them."""
    grad_fn = dpmp.clipped_grad(
        policy.in_product_precision(task.loss_fn),
        l2_clip_norm=1.0,
        method=method,
        arithmetic=None if method == "per_example" else "unproved_float32",
    )

    def step(params: Any, batch: Any) -> Any:
        return grad_fn(policy.cast_to_compute(params), policy.cast_inputs(batch))

    program = h100.compile_for(sharding, step, task.params, task.batch, **_WITH_CUBLAS)
    return dict(collections.Counter(re.findall(r"__cublas\$[\w$]+", program.as_text())))


def main() -> None:
    """Compiles what was asked for."""
    parser = argparse.ArgumentParser(description="Compiles steps for a GPU.")
    parser.add_argument("--task", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=[*DTYPES])
    args = parser.parse_args()
    sharding = h100.sharding()
    append = functools.partial(
        results.append, "gpu_programs", compiled_for=h100.device_kind()
    )
    for name, dtype in itertools.product(args.task, args.dtype):
        task = TASKS[name].make(DTYPES[dtype], 64)
        figures = measure_memory(task, sharding)
        append(question="memory", task=name, dtype=dtype, batch_size=64, **figures)
    _float8.is_native = lambda: True  # as it would be there
    task = TASKS["transformer, 3M"].make(jnp.float32, 16)
    for name, method in itertools.product(
        ("mixed_bfloat16", "float8"), ("per_example", "book_keeping")
    ):
        policy = dpmp.Policy.from_name(name)
        counts = count_products(task, policy, method, sharding)
        append(question="products", policy=name, method=method, products=counts)


if __name__ == "__main__":
    main()
