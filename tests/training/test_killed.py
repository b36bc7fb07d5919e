"""A run that is killed at any instant, again and again, ends with the same bits."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from dpmp import runs

PROGRAM = pathlib.Path(__file__).with_name("killed_run.py")
ROOT = pathlib.Path(__file__).parents[2]
KILLS = int(os.environ.get("DPMP_TEST_KILLS", "5"))


def start(directory, result, *, under=()):
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [*under, sys.executable, str(PROGRAM), str(directory), str(result)]
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)


def finish(directory, result, *, under=()):
    process = start(directory, result, under=under)
    _, errors = process.communicate()
    return process.returncode, errors


def num_steps(directory):
    return sum(run.num_steps for run in runs.Ledger.open(directory).runs)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    started = time.monotonic()
    status, errors = finish(folder / "run", folder / "result")
    assert status == 0, errors
    return (folder / "result").read_text(), time.monotonic() - started


@pytest.mark.slow
def test_every_killed_run_ends_with_the_bits_of_the_undisturbed_one(
    tmp_path, undisturbed
):
    digest, seconds = undisturbed
    instants, kills, number = random.Random(0), 0, 0
    while kills < KILLS or (tmp_path / f"run{number}").exists():
        directory, result = tmp_path / f"run{number}", tmp_path / f"result{number}"
        process = start(directory, result)
        if kills < KILLS:
            try:
                process.wait(instants.uniform(0.3, 1.1) * seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                kills += 1
        _, errors = process.communicate()
        if process.returncode == 0:
            assert result.read_text() == digest
            assert num_steps(directory) == 150  # none is lost, and none counts twice
            number += 1
        else:
            assert process.returncode == -signal.SIGKILL, errors
    assert number >= 1


@pytest.mark.slow
def test_sigterm_saves_the_last_step(tmp_path, undisturbed):
    digest, _ = undisturbed
    directory, result = tmp_path / "run", tmp_path / "result"
    process = start(directory, result)
    while not (directory / "checkpoints" / "10").is_dir():
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    _, errors = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert "Run the same program again to go on" in errors
    saved = [int(x.name) for x in (directory / "checkpoints").iterdir()]
    assert num_steps(directory) == max(saved)
    assert finish(directory, result)[0] == 0
    assert result.read_text() == digest


@pytest.mark.slow
def test_a_full_disk_loses_nothing(tmp_path, undisturbed):
    """No file may be longer than eleven blocks of 512 bytes."""
    digest, _ = undisturbed
    directory, result = tmp_path / "run", tmp_path / "result"
    limit = ("sh", "-c", 'ulimit -f 11; exec "$@"', "sh")
    status, errors = finish(directory, result, under=limit)
    assert status == 1
    assert "File too large" in errors
    assert 0 < num_steps(directory) < 150
    assert finish(directory, result)[0] == 0
    assert result.read_text() == digest
    assert num_steps(directory) == 150


@pytest.mark.slow
def test_a_cut_ledger_is_recovered_or_refused(tmp_path, undisturbed):
    digest, _ = undisturbed
    directory, result = tmp_path / "run", tmp_path / "result"
    process = start(directory, result)
    while not (directory / "checkpoints" / "20").is_dir():
        time.sleep(0.02)
    process.kill()
    process.communicate()
    ledger = directory / "ledger.jsonl"
    content = ledger.read_bytes()
    ledger.write_bytes(content[:-7])  # the last line is incomplete
    assert finish(directory, result)[0] == 0
    assert result.read_text() == digest
    ledger.write_bytes(content.replace(b'"start": 0', b'"start": 1'))
    status, errors = finish(directory, result)
    assert status == 1
    assert "every line of a ledger must be as it was written" in errors
