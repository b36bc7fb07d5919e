"""What would a GPU be asked to run? Programs compiled for one, without one.

Compiles steps for an NVIDIA H100 on a machine that need not have any GPU, and says

- temporary memory and compile seconds, of plain training's (`jax.grad` of the mean
  loss), for the models of `book_keeping.py`;
- by operands and result, how many of a step's products run in cuBLAS, and how many of
  them in float8: for the preset "float8" and "mixed_bfloat16".

Time is not in it, and as kernels are not tried out on a device, those in the last
program may be others than are chosen on one.

    pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt  # of the version of jax
    python benchmarks/gpu_programs.py        # eight minutes on two cores

Every line is appended to benchmarks/results/gpu_programs.jsonl.
"""

import argparse
import collections
import functools
import itertools
import os
import re
import time
from collections.abc import Callable
from typing import Any

# Before jax is there: the plugin would look for a driver, and stop at that.
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import jax
import jax.numpy as jnp
import models
import results
from book_keeping import DTYPES, TASKS
from jax.experimental import topologies

import dpmp
from dpmp import _float8

# An H100 with 80 GB, as XLA describes devices.
_H100 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 8 patch: 0 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
"""
_WITH_CUBLAS = {"xla_gpu_enable_triton_gemm": False}


def contenders(task: models.Task) -> dict[str, Callable[..., Any]]:
    """Functions of (params, batch), by name."""
    clip = functools.partial(dpmp.clipped_grad, task.loss_fn, l2_clip_norm=1.0)
    kept = functools.partial(clip, method="book_keeping")
    return {
        "plain": jax.grad(task.loss_fn),
        "book-keeping, at once": kept(accumulator="unproved_float32"),
        "book-keeping, 8": kept(microbatch_size=8, accumulator="unproved_float32"),
        "book-keeping, bounded, 8": kept(microbatch_size=8),
        "per example, 8": clip(microbatch_size=8),
    }


def compile_for(
    sharding: Any, fun: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    """The program of a function of arrays like these."""
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args
    )
    lowered = jax.jit(lambda *xs: fun(*xs)).lower(*shapes)
    return lowered.compile(compiler_options=options)


def measure_memory(task: models.Task, sharding: Any) -> dict[str, dict[str, float]]:
    """Megabytes and seconds of all contenders, and ratios to the plain gradient."""
    megabytes, seconds = {}, {}
    functions = contenders(task)
    for name, fun in [*functions.items()] * 2:  # the first time fills caches of jax
        start = time.perf_counter()
        program = compile_for(sharding, fun, task.params, task.batch)
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
        accumulator=None if method == "per_example" else "unproved_float32",
    )

    def step(params: Any, batch: Any) -> Any:
        return grad_fn(policy.cast_to_compute(params), policy.cast_inputs(batch))

    program = compile_for(sharding, step, task.params, task.batch, **_WITH_CUBLAS)
    return dict(collections.Counter(re.findall(r"__cublas\$[\w$]+", program.as_text())))


def main() -> None:
    """Compiles what was asked for."""
    parser = argparse.ArgumentParser(description="Compiles steps for a GPU.")
    parser.add_argument("--task", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=[*DTYPES])
    args = parser.parse_args()
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=_H100, topology="1x1x1"
    )
    mesh = topologies.make_mesh(topology, (1,), ("devices",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    append = functools.partial(
        results.append, "gpu_programs", compiled_for=topology.devices[0].device_kind
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
