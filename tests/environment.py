"""Flags and caches of the compiler, for the tests and for the processes they start."""

import os
import pathlib

import jax

TESTS = pathlib.Path(__file__).parent
QUICK_TO_COMPILE = (
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
)
if jax.__version_info__ < (0, 12):  # later versions of XLA do not know this flag
    QUICK_TO_COMPILE += " --xla_cpu_use_fusion_emitters=false"
CACHE = {
    "JAX_COMPILATION_CACHE_DIR": str(TESTS.parent / ".pytest_cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}


def environment(xla_flags: str = QUICK_TO_COMPILE) -> dict[str, str]:
    """The environment of another process, which has as many devices as a user's."""
    paths = {"PYTHONPATH": f"{TESTS}:{TESTS.parent}", "JAX_PLATFORMS": "cpu"}
    return {**CACHE, **os.environ, **paths, "XLA_FLAGS": xla_flags}
