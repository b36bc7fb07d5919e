"""Every test runs under strict dtype promotion, on eight CPU devices.

The compiler takes most of the time of the tests, so that the fast ones ask it for
little optimization. The slow tests, and by `-m "slow or bits"` those of the arithmetic,
run programs that are compiled as those of users are.

`DPMP_TEST_PLATFORM=cuda,cpu` runs the tests on the first GPU instead. Tests that need
several devices fail there.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import pathlib
import signal

import hypothesis
import jax
import pytest

QUICK_TO_COMPILE = ["--xla_backend_optimization_level=0"]
if jax.__version_info__ < (0, 12):  # later versions of XLA do not know this flag
    QUICK_TO_COMPILE.append("--xla_cpu_use_fusion_emitters=false")
ARITHMETIC = {"clipping", "contract", "noise_addition", "numerics"}


def pytest_configure(config):
    """Chooses the flags of the compiler, which it reads at its first use."""
    if config.option.markexpr == "not slow":
        os.environ["XLA_FLAGS"] = " ".join([os.environ["XLA_FLAGS"], *QUICK_TO_COMPILE])


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name in ARITHMETIC:
            item.add_marker("bits")


# What was compiled once, in this run or an earlier one, is not compiled anew.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    cache = pathlib.Path(__file__).parents[1] / ".pytest_cache" / "jax"
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_platforms", os.environ.get("DPMP_TEST_PLATFORM", "cpu"))
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Compilation makes the first example of a test slow.
hypothesis.settings.register_profile(
    "dpmp", deadline=None, max_examples=20, derandomize=True
)
hypothesis.settings.load_profile("dpmp")


@pytest.fixture
def ctrl_c():
    """Lets SIGINT interrupt. A shell starts jobs in the background without that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
