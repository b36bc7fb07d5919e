"""The machine and the software of a run, as far as the bits of a step depend on them.

A run that is killed makes the steps since its last checkpoint again. If they give the
same bits, they release nothing new. On another machine, the gradients may differ in
their last bits. Then the same noise would be added to other sums, and the difference of
both results would reveal the difference of the sums, without noise.
"""

import functools
import importlib.metadata
import json
import os
import secrets

import jax

_OPTIONS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)


def describe_environment() -> str:
    """Describes devices, versions and options in one line of JSON.

    Where a step may have other bits each time, the description is different each time.
    On a GPU, sums of floats depend on the order in which threads finish, unless XLA is
    told to keep it.
    """
    device, xla_flags = jax.devices()[0], os.environ.get("XLA_FLAGS", "")
    is_fixed = device.platform in ("cpu", "tpu")
    is_fixed = is_fixed or "--xla_gpu_deterministic_ops=true" in xla_flags
    facts = {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "cpus": os.cpu_count() if device.platform == "cpu" else None,
        "dpmp": version("dpmp"),
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        "xla_flags": xla_flags,
        "options": {name: str(getattr(jax.config, name)) for name in _OPTIONS},
        "only_once": None if is_fixed else secrets.token_hex(),
    }
    return json.dumps(facts, sort_keys=True)


@functools.cache
def version(package: str) -> str:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
