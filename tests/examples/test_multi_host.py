"""That the example trains the same model with any number of processes."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]


def run(output, *flags):
    """Runs the example for three steps; returns what it prints and the parameters."""
    command = [sys.executable, str(ROOT / "examples" / "multi_host.py"), "--steps", "3"]
    # Without the XLA_FLAGS of the tests, which set the number of devices.
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [*command, "--output", str(output), *flags],
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with np.load(output) as arrays:
        return done.stdout, dict(arrays)


@pytest.mark.slow
def test_two_processes_train_the_model_of_one_process_bit_for_bit(tmp_path):
    printed, params = run(tmp_path / "two.npz")
    assert "2 processes, 2 devices" in printed
    printed, expected = run(tmp_path / "one.npz", "--processes", "1", "--devices", "2")
    assert "1 processes, 2 devices" in printed
    assert params.keys() == expected.keys()
    for name, x in expected.items():
        assert np.any(x)
        np.testing.assert_array_equal(params[name], x)
