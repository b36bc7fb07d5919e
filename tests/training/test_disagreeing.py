"""Two processes that differ are refused: they would add one noise to two sums."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).with_name("disagreeing_run.py")
TESTS = PROGRAM.parents[1]
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
ENVIRONMENT |= {"PYTHONPATH": f"{TESTS}:{TESTS.parent}", "JAX_PLATFORMS": "cpu"}


@pytest.mark.slow
def test_processes_that_differ_are_refused():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    running = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), address, str(i)],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    outputs = [x.communicate(timeout=300) for x in running]
    one, two = (
        dict(x.split(" : ")[1:] for x in output.splitlines() if x.startswith("case"))
        for output, _ in outputs
    )
    assert len(one) == 22, outputs
    assert one == two
    made = [name for name, x in one.items() if not x.startswith("ValueError")]
    assert made == ["same", "whole", "step", "second step"]
    for name, x in one.items():
        if name == "alone":
            assert "batch_sharding must have devices of every process" in x
        elif name == "arrays":
            assert "a batch must be committed to devices of all processes" in x
        elif name == "frozen":
            assert "all processes must have the same state" in x
        elif name not in made:
            assert "all processes must have the same" in x, (name, x)
