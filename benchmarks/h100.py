"""An NVIDIA H100 to compile for, on a machine that need not have any GPU.

As kernels are not tried out on a device, those in a program may be others than are
chosen on one. It needs the plugin of jax for CUDA, of the version of jax:

    pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt
"""

import os
import pathlib
from typing import Any

# Before jax is there: the plugin would look for a driver, and stop at that.
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

from jax.experimental import topologies

from benchmarks import harness

# An H100 with 80 GB, as XLA describes devices.
_H100 = pathlib.Path(__file__).with_suffix(".textproto")


# Kernels of Triton have to be tried out on a device, and without that some tiles fit
# no product.
OPTIONS = {"xla_gpu_enable_triton_gemm": False}


def topology(name: str) -> Any:
    """Devices that are not there: slices x hosts x devices of a host."""
    if not harness.is_installed("jax_cuda12_plugin"):
        raise SystemExit(
            "The plugin of jax for CUDA must be installed; it was not found. Run: "
            "pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt"
        )
    return topologies.get_topology_desc(
        platform="cuda", target_config=_H100.read_text(), topology=name
    )
