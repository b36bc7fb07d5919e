"""The library's own tests of its arithmetic, on this device."""

import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks import harness
from benchmarks.gpu.programs import Session

_ROOT = pathlib.Path(__file__).parents[2]

# What rests on the arithmetic of the device, the most important first.
_FILES = (
    "numerics/test_exact",
    "numerics/test_bounded",
    "numerics/test_float_sums",
    "noise_addition/test_discrete_gaussian",
    "test_threefry",
    "numerics/test_stored",
    "clipping/test_clip_norms",
    "test_fence",
    "engines/book_keeping/test_linalg",
    "test_random",
    "engines/book_keeping/test_neighbours",
    "noise_addition/test_noise_addition",
    "precision/test_stochastic_rounding",
    "programs/test_float8",
    "engines/book_keeping/test_engine",
)
_TINY_FILES = ("engines/book_keeping/test_linalg",)
_PROCESSES = 8

_OUTCOMES = ("PASSED", "FAILED", "ERROR", "SKIPPED")


def run(session: Session) -> None:
    """Runs pytest, and writes what it said even if there was no time for all of it."""
    if not harness.is_installed("pytest"):
        session.record("tests", outcome="not run: pytest is missing")
        return
    files = _TINY_FILES if session.is_tiny else _FILES
    outcome, output = _run_pytest(files, session.seconds_left() - 10)
    counts, failed = parse(output)
    more = {"output": output[-20_000:]} if failed or not counts else {}
    session.record("tests", outcome=outcome, counts=counts, failed=failed, **more)


def parse(output: str) -> tuple[dict[str, int], list[str]]:
    """How many tests have each outcome in pytest's verbose output, and which failed."""
    lines = [line for line in output.splitlines() if "%]" in line]
    found = {x: [line for line in lines if f" {x}" in line] for x in _OUTCOMES}
    counts = {x.lower(): len(tests) for x, tests in found.items() if tests}
    return counts, found["FAILED"] + found["ERROR"]


def _run_pytest(files: tuple[str, ...], limit: float) -> tuple[str, str]:
    """How it ended, and all it printed until then."""
    with tempfile.TemporaryFile("w+") as output:
        outcome = harness.run_for(
            [sys.executable, "-m", "pytest", *_arguments(files)],
            limit,
            cwd=_ROOT,
            env=_environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        output.seek(0)
        return outcome, output.read()


def _arguments(files: tuple[str, ...]) -> list[str]:
    # Warnings of a newer jax say nothing about the device.
    options = ["-v", "--tb=short", "-m", "not slow", "-W", "default"]
    options += ["-o", "addopts=", "--import-mode=importlib"]
    if harness.is_installed("xdist") and len(files) > 1:
        options += ["-n", str(_PROCESSES), "--maxschedchunk", "1"]  # in this order
    return [*options, "-p", "no:cacheprovider", *(f"tests/{x}.py" for x in files)]


def _environment() -> dict[str, Any]:
    """Of several processes on the first device, which must repeat what they compute."""
    import jax

    flags = "--xla_gpu_exclude_nondeterministic_ops=true"
    flags += " --xla_force_host_platform_device_count=8"
    return {
        **os.environ,
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "DPMP_TEST_PLATFORM": "cuda,cpu" if jax.default_backend() == "gpu" else "cpu",
    }
