"""Every benchmark begins, and runs in its smallest size."""

import json
import pathlib
import runpy
import sys
from typing import Annotated

import jax
import pytest

from benchmarks import harness

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks"
COMMANDS = sorted(
    path.stem for path in FOLDER.glob("*.py") if "harness.main(" in path.read_text()
)
# The smallest sizes of all others take minutes: they compile models as they are.
_QUICK = (
    "accuracy_by_noise",
    "large_runs",
    "least_noise",
    "sabotage",
    "canaries",
    "timing",
)


@pytest.mark.parametrize("name", [x for x in COMMANDS if x not in _QUICK])
def test_a_command_explains_its_flags(name, monkeypatch, capsys):
    if name == "selfcheck_others":
        pytest.importorskip("jax_privacy")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert stopped.value.code == 0
    assert "--tiny" in capsys.readouterr().out


def test_each_combination_of_flags_has_a_line(tmp_path, monkeypatch):
    def benchmark(
        task: Annotated[str, harness.Each("ab")],
        size: Annotated[int, harness.Each(default=(1, 2))],
        rounds: int | None = None,
    ):
        yield {"figure": task * size, "rounds": rounds or 7}

    flags = ["--task", "b", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["test_commands", *flags])
    harness.main(benchmark, tiny={})
    lines = (tmp_path / "test_commands.jsonl").read_text().splitlines()
    found = [json.loads(x) for x in lines]
    names = ("task", "size", "figure", "rounds")
    expected = [("b", 1, "b", 7), ("b", 2, "bb", 7)]
    assert [tuple(x[name] for name in names) for x in found] == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", _QUICK)
@jax.numpy_dtype_promotion("standard")  # as users have it
def test_a_benchmark_runs_in_its_smallest_size(name, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, "--tiny", "--out", str(tmp_path)])
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()
    figures = [json.loads(line) for line in lines]
    assert all(x["device"] == harness.device() for x in figures)
    assert not any(x.get("refused") for x in figures)
