"""The machine and the software of a run, as far as the bits of a step depend on them.

A run that is killed makes the steps since its last checkpoint again. If they give the
same bits, they release nothing new. On another machine, the gradients may differ in
their last bits. Then the same noise would be added to other sums, and the difference of
both results would reveal the difference of the sums, without noise.
"""

import json
import os

import jax

_OPTIONS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)


def environment() -> str:
    """Describes devices, versions and options in one line of JSON."""
    device = jax.devices()[0]
    facts = {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "cpus": os.cpu_count() if device.platform == "cpu" else None,
        "jax": jax.__version__,
        "jaxlib": jax.lib.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "options": {name: str(getattr(jax.config, name)) for name in _OPTIONS},
    }
    return json.dumps(facts, sort_keys=True)


def gives_the_same_bits(then: str, now: str) -> bool:
    """Whether a step that was made in one environment has the same bits in another.

    On a GPU, sums of floats depend on the order in which threads finish, unless XLA is
    told to keep it.
    """
    facts = json.loads(now)
    is_fixed = facts["platform"] in ("cpu", "tpu")
    is_fixed = is_fixed or "--xla_gpu_deterministic_ops=true" in facts["xla_flags"]
    return then == now and is_fixed
