"""Every benchmark begins: its command line, and the examples that it takes over."""

import importlib
import pathlib
import sys

import jax
import pytest

from benchmarks import peers

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks"
COMMANDS = sorted(
    path.stem for path in FOLDER.glob("*.py") if "ArgumentParser(" in path.read_text()
)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_explains_its_flags(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(f"benchmarks.{name}").main()
    assert stopped.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_a_library_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_privacy", None)
    monkeypatch.delitem(sys.modules, "jax_privacy.clipping", raising=False)
    with pytest.raises(SystemExit, match=r"jax_privacy.*pip install '.\[bench\]'"):
        peers.jax_privacy_clipped_grad()


@pytest.mark.slow
def test_tasks_of_the_examples_are_made(monkeypatch):
    from benchmarks import accuracy_tasks

    monkeypatch.setattr(accuracy_tasks, "_PRETRAINING_STEPS", 1)
    with jax.numpy_dtype_promotion("standard"):  # as users have it
        assert accuracy_tasks.transformer().num_examples > 1000
