"""That the example trains the same model with any number of processes."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from small_runs import num_paid

ROOT = pathlib.Path(__file__).parents[2]


# Without the XLA_FLAGS of the tests, which set the number of devices.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
ENVIRONMENT["PYTHONPATH"] = str(ROOT)


def command(*flags):
    return [sys.executable, str(ROOT / "examples" / "multi_host.py"), *map(str, flags)]


def run(output, *flags, steps=3):
    """Runs the example for some steps; returns what it prints and the parameters."""
    done = subprocess.run(
        command("--steps", steps, "--output", output, *flags),
        env=ENVIRONMENT,
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


@pytest.mark.slow
def test_a_job_goes_on_after_one_process_was_killed(tmp_path):
    directory, output = tmp_path / "run", tmp_path / "two.npz"
    started = subprocess.Popen(
        command("--checkpoints", directory), env=ENVIRONMENT, stderr=subprocess.DEVNULL
    )
    while not (directory / "checkpoints" / "10").is_dir():
        assert started.poll() is None
        time.sleep(0.05)
    children = subprocess.run(
        ["pgrep", "-P", str(started.pid)], capture_output=True, text=True, check=True
    )
    os.kill(int(children.stdout.split()[1]), signal.SIGKILL)
    assert started.wait() == 1
    assert 10 <= num_paid(directory) < 40
    _, params = run(output, "--checkpoints", directory, steps=40)
    _, expected = run(tmp_path / "undisturbed.npz", steps=40)
    # The other process may have failed as well, and has paid for its steps then. They
    # are not made again with the same key.
    assert 40 <= num_paid(directory) <= 51
    for name, x in expected.items():
        is_same = np.array_equal(params[name], x)
        assert is_same == (num_paid(directory) == 40)
