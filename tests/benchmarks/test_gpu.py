"""The benchmark for GPUs: it keeps what it has, and every part of it runs."""

import json
import os
import sys
import time

import jax
import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import tests as gpu_tests
from benchmarks.gpu.programs import Session, finding, run_checks


def _lines(folder):
    return [
        json.loads(line) for line in (folder / "gpu.jsonl").read_text().splitlines()
    ]


def _run_part(folder, code, seconds=30.0):
    return gpu.run_part(
        "small",
        [sys.executable, "-c", code],
        seconds=seconds,
        folder=folder,
        environment=os.environ,
    )


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("pass", "ended"),
        ("raise SystemExit(3)", "exit status 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "exit status -9"),
    ],
)
def test_how_a_part_ended_is_written(tmp_path, code, outcome):
    assert _run_part(tmp_path, code) == outcome
    (line,) = _lines(tmp_path)
    assert (line["part"], line["outcome"]) == ("small", outcome)


def test_a_part_that_hangs_is_ended_with_all_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "_GRACE", 0.0)
    pid_file = tmp_path / "pid"
    code = f"""
import pathlib, subprocess, time
child = subprocess.Popen(["sleep", "60"])
pathlib.Path({str(pid_file)!r}).write_text(str(child.pid))
time.sleep(60)
"""
    start = time.monotonic()
    assert _run_part(tmp_path, code, seconds=3.0) == "stopped after 3 seconds"
    assert time.monotonic() - start < 20
    assert _has_ended(int(pid_file.read_text()))


def _has_ended(pid):
    """Whether a process is gone, or waits for nothing but to be looked at."""
    for _ in range(50):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.1)
    return False


def test_all_parts_together_take_less_than_twenty_minutes():
    assert sum(part.seconds + gpu._GRACE for part in gpu.PARTS.values()) <= 1200


def test_the_tests_of_the_arithmetic_are_there():
    folder = gpu_tests._ROOT / "tests"
    for name in (*gpu_tests._FILES, *gpu_tests._TINY_FILES):
        assert (folder / f"{name}.py").exists(), name


def test_outcomes_are_read_with_and_without_several_processes():
    output = """
tests/test_a.py::test_one[x-y z] PASSED                                 [ 50%]
[gw1] [ 75%] FAILED tests/test_a.py::test_two
[gw0] [100%] PASSED tests/test_b.py::test_three[1]
tests/test_b.py::test_never_ended
"""
    counts, failed = gpu_tests.parse(output)
    assert counts == {"passed": 2, "failed": 1}
    assert failed == ["[gw1] [ 75%] FAILED tests/test_a.py::test_two"]


def test_a_check_that_fails_leaves_its_findings_and_the_other_checks(tmp_path):
    def breaks(session):
        yield finding("largest contribution", 2, 1)
        raise RuntimeError("out of memory")

    def holds(session):
        yield finding("largest contribution", 1, 1)

    session = Session(part="exact", folder=tmp_path, seconds=10, is_tiny=True)
    run_checks(session, (breaks, holds))
    lines = _lines(tmp_path)
    assert [line["passed"] for line in lines] == [False, False, True]
    assert lines[1]["error"] == "RuntimeError: out of memory"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:optax.global_norm:DeprecationWarning")
def test_every_part_runs_in_a_tiny_size(tmp_path, monkeypatch):
    # Tiny models of all sizes are the same, and `selfcheck` has a test of its own.
    others = {"selfcheck", "medium", "large", "decoder"}
    for part in gpu.PARTS.keys() - others:
        flags = ["--tiny", "--inside", "--seconds", "300", "--part", part]
        monkeypatch.setattr(sys, "argv", ["gpu", *flags, "--out", str(tmp_path)])
        with jax.numpy_dtype_promotion("standard"):  # which jax_privacy needs
            assert gpu.main() == 0
    lines = _lines(tmp_path)
    assert not [line for line in lines if line.get("error") or line.get("broken")]
    assert all(line["passed"] for line in lines if line["question"] == "claim")
    compared = {line["part"] for line in lines if line["question"] == "comparison"}
    assert compared == {"small", "smollm2", "float8", "noise"}


def test_a_machine_without_a_gpu_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    flags = ["--part", "noise", "--out", str(tmp_path), "--inside"]
    monkeypatch.setattr(sys, "argv", ["gpu", *flags])
    assert gpu.main() == gpu._DEVICE_IS_MISSING
    error = capsys.readouterr().err
    assert "needs a GPU; jax finds only a CPU. Use --tiny" in error
