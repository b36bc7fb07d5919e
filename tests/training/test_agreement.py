"""Two processes that differ are refused: they would add one noise to two sums."""

import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from environment import environment
from jax.experimental import multihost_utils
from small_runs import PARAMS, new_trainer

from dpmp import _processes
from dpmp.training import _agreement

PROGRAM = pathlib.Path(__file__).with_name("disagreeing_run.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hidden", "with_other_arrays", "names"),
    [
        ("0", "frozen", []),  # all of them
        ("1", "closure", ["same", "frozen key", "closure", "loss", "frozen"]),
    ],
)
def test_processes_that_differ_are_refused(hidden, with_other_arrays, names):
    """Also if jax hides constants from the text of a program, and hoists none."""
    hiding = {"JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS": hidden}
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    running = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), address, str(i), *names],
            env=environment() | hiding,
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
    assert len(one) == (len(names) or 19), outputs
    assert one == two
    made = [name for name, x in one.items() if not x.startswith("ValueError")]
    assert made == (["same"] if names else ["same", "whole", "step", "second step"])
    for name, x in one.items():
        if name == "alone":
            assert "batch_sharding must have devices of every process" in x
        elif name == "arrays":
            assert "a batch must be committed to devices of all processes" in x
        elif name == with_other_arrays:
            assert "all processes must have the same state" in x
        elif name not in made:
            assert "all processes must have the same" in x, (name, x)


def test_replicas_are_compared_where_two_processes_have_them(monkeypatch):
    """Of two processes, each has one half of an array, and both have a number."""
    monkeypatch.setattr(_processes, "_check_devices", lambda: None)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    # A half, a number, and what one process says of the other half.
    others = {"same": [0, 5, 7], "another number": [0, 5, 9], "wrong": [3, 5, 7]}
    for name, theirs in others.items():
        rows = iter([1, 0, 7])
        monkeypatch.setattr(_agreement, "_checksums", lambda x, r=rows: [next(r)])
        monkeypatch.setattr(
            multihost_utils,
            "process_allgather",
            lambda x, y=theirs: np.stack([x, y if len(x) == 3 else x]),
        )
        assert _agreement._are_replicas_equal([1, 2, 3]) == (name == "same")


def test_checksums_tell_frozen_keys_apart():
    keys = [jax.random.key(seed) for seed in (0, 0, 1)]
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    for place in (jax.devices()[0], jax.NamedSharding(mesh, jax.P("a"))):
        several = [jax.device_put(jax.random.split(key, 4), place) for key in keys]
        one, same, other = map(_agreement._checksums, several)
        assert one == same
        assert all(x not in (0, y) for x, y in zip(one, other, strict=True))
    one, same, other = map(_agreement._checksums, keys)
    assert one == same != other


def test_processes_must_have_the_same_flags_of_the_compiler(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    lowered, said = jax.jit(abs).lower(1.0), []
    monkeypatch.setattr(_agreement, "are_equal", lambda *x: not said.append(x))
    for flags in (
        "--xla_cpu_enable_fast_math=true",
        "--xla_dump_to=one --xla_cpu_enable_fast_math=true",
        "--xla_cpu_enable_fast_math=false",
    ):
        monkeypatch.setenv("XLA_FLAGS", flags)
        _agreement.check_same_program(lowered)
    one, same, other = said
    assert one == same != other


def test_processes_must_have_the_same_key(monkeypatch):
    said = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(_processes, "random_id", lambda: "0")
    monkeypatch.setattr(_agreement, "are_equal", lambda *x: said.append(x) or False)
    for key in (1, 123456789, None):
        trainer = new_trainer(prng_key=None if key is None else jax.random.key(key))
        with pytest.raises(ValueError, match="the same mechanism, prng_key") as error:
            trainer._compare_processes(trainer.init(PARAMS), lambda indices: (), None)
        assert "123456789" not in str(error.value)
        # Reports of variables do not show the key. (The first frame is this one.)
        shown = [repr(x.frame.f_locals) for x in error.traceback[1:]]
        key_bytes = repr(np.uint32(123456789).tobytes())[2:-1]
        assert len(shown) > 1
        assert not any("123456789" in x or key_bytes in x for x in shown)
    assert len(set(said)) == 3
