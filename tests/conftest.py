"""Every test runs under strict dtype promotion, on eight CPU devices.

`DPMP_TEST_PLATFORM=cuda,cpu` runs the tests on the first GPU instead. Tests that need
several devices fail there.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import hypothesis
import jax

jax.config.update("jax_platforms", os.environ.get("DPMP_TEST_PLATFORM", "cpu"))
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Compilation makes the first example of a test slow.
hypothesis.settings.register_profile(
    "dpmp", deadline=None, max_examples=20, derandomize=True
)
hypothesis.settings.load_profile("dpmp")
