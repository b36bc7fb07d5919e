"""Every test runs under strict dtype promotion, on eight CPU devices.

The compiler takes most of the time of the tests, so that most ask it for little
optimization. With `-m bits`, the tests of the arithmetic run programs that are compiled
as those of users are.

`DPMP_TEST_PLATFORM=cuda,cpu` runs the tests on the first GPU instead. Tests that need
several devices fail there.
"""

import gc
import os
import signal

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import environment
import hypothesis
import jax
import pytest

ARITHMETIC = {"contract", "noise_addition", "numerics"}


def pytest_configure(config):
    """Chooses the flags of the compiler, which it reads at its first use."""
    if config.option.markexpr != "bits":
        os.environ["XLA_FLAGS"] += f" {environment.QUICK_TO_COMPILE}"


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name in ARITHMETIC:
            item.add_marker("bits")
        if "tunix" in item.nodeid:
            item.add_marker("tunix")


# What was compiled once, in this run or an earlier one, is not compiled anew.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    directory = environment.CACHE["JAX_COMPILATION_CACHE_DIR"]
    jax.config.update("jax_compilation_cache_dir", directory)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_platforms", os.environ.get("DPMP_TEST_PLATFORM", "cpu"))
jax.config.update("jax_numpy_dtype_promotion", "strict")

# jax keeps many objects alive, and looking for garbage among them takes time.
gc.freeze()
gc.set_threshold(50_000, 50, 100)

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
