"""That the example trains the same model with any number of processes."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from environment import environment
from small_runs import num_paid

ROOT = pathlib.Path(__file__).parents[2]


def command(*flags):
    return [sys.executable, str(ROOT / "examples" / "multi_host.py"), *map(str, flags)]


def run(output, *flags):
    """Runs the example; returns what it prints and the parameters."""
    done = subprocess.run(
        command("--output", output, *flags),
        env=environment(xla_flags=""),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with np.load(output) as arrays:
        return done.stdout, dict(arrays)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    printed, params = run(tmp_path_factory.mktemp("undisturbed") / "two.npz")
    assert "2 processes, 2 devices" in printed
    return params


@pytest.mark.slow
def test_two_processes_train_the_model_of_one_process_bit_for_bit(
    tmp_path, undisturbed
):
    printed, params = run(tmp_path / "one.npz", "--processes", "1", "--devices", "2")
    assert "1 processes, 2 devices" in printed
    assert params.keys() == undisturbed.keys()
    for name, x in undisturbed.items():
        assert np.any(x)
        np.testing.assert_array_equal(params[name], x)


def wait_for(directory, process):
    while not directory.is_dir():
        assert process.poll() is None
        time.sleep(0.01)


@pytest.mark.slow
def test_a_job_goes_on_after_one_process_was_killed(tmp_path, undisturbed):
    directory, output = tmp_path / "run", tmp_path / "two.npz"
    started = subprocess.Popen(
        command("--checkpoints", directory),
        env=environment(xla_flags=""),
        stderr=subprocess.DEVNULL,
    )
    wait_for(directory, started)
    children = subprocess.run(
        ["pgrep", "-P", str(started.pid)], capture_output=True, text=True, check=True
    )
    wait_for(directory / "checkpoints" / "10", started)
    os.kill(int(children.stdout.split()[1]), signal.SIGKILL)
    assert started.wait() == 1
    assert 10 <= num_paid(directory) < 40
    _, params = run(output, "--checkpoints", directory)
    # The other process may have failed as well, and has paid for its steps then. They
    # are not made again with the same key.
    assert 40 <= num_paid(directory) <= 51
    for name, x in undisturbed.items():
        is_same = np.array_equal(params[name], x)
        assert is_same == (num_paid(directory) == 40)
