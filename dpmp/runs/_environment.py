"""The machine and the software of a run, as far as the bits of a step depend on them.

A run that is killed makes the steps since its last checkpoint again. If they give the
same bits, they release nothing new. On another machine, the gradients may differ in
their last bits. Then the same noise would be added to other sums, and the difference of
both results would reveal the difference of the sums, without noise.
"""

import contextlib
import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import secrets

import jax

# Not every version of jax has all of them.
_OPTIONS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_jit",
    "jax_disable_most_optimizations",
    "jax_enable_remat_opt_pass",
    "jax_enable_x64",
    "jax_exec_time_optimization_effort",
    "jax_numpy_dtype_promotion",
    "jax_optimization_level",
    "jax_threefry_partitionable",
)

# Those of OpenBLAS decide how scipy, and so jax.numpy.linalg, splits its work.
_VARIABLES = (
    "GOTO_NUM_THREADS",
    "LIBTPU_INIT_ARGS",
    "NPROC",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_NUM_THREADS",
    "PJRT_NPROC",
    "XLA_FLAGS",
)


def describe_environment() -> str:
    """Describes devices, versions and options in one line of JSON.

    Where a step may have other bits each time, the description is different each time.
    On a GPU, sums of floats depend on the order in which threads finish, unless XLA is
    told to keep it.
    """
    device = jax.devices()[0]
    variables = {name: os.environ.get(name, "") for name in _VARIABLES}
    is_fixed = device.platform in ("cpu", "tpu")
    is_fixed = is_fixed or "--xla_gpu_deterministic_ops=true" in variables["XLA_FLAGS"]
    facts = {
        "platform": device.platform,
        "platform_version": device.client.platform_version,
        "device_kind": device.device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "cpus": _describe_processor() if device.platform == "cpu" else None,
        "dpmp": version("dpmp"),
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        "scipy": version("scipy"),
        "variables": variables,
        "options": {name: str(getattr(jax.config, name, None)) for name in _OPTIONS},
        "only_once": None if is_fixed else secrets.token_hex(),
    }
    return json.dumps(facts, sort_keys=True)


def _describe_processor() -> list[str]:
    """What XLA compiles for: the processors in use, their model and their features."""
    in_use = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    facts = {platform.machine(), platform.processor(), f"{len(in_use)} processors"}
    with contextlib.suppress(OSError):  # Linux alone has this file
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        names = ("model name", "flags", "CPU part", "Features")
        facts |= {line for line in lines if line.startswith(names)}
    return sorted(facts)


@functools.cache
def version(package: str) -> str:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
