"""Every benchmark begins: its command line, and the examples that it takes over."""

import importlib
import pathlib
import sys

import jax
import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks"
COMMANDS = sorted(
    path.stem for path in FOLDER.glob("*.py") if "ArgumentParser(" in path.read_text()
)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_explains_its_flags(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    try:
        benchmark = importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        if error.name != "jax_privacy":  # it comes with the extra `bench`
            raise
        pytest.skip(str(error))
    with pytest.raises(SystemExit) as stopped:
        benchmark.main()
    assert stopped.value.code == 0
    assert "usage:" in capsys.readouterr().out


@pytest.mark.slow
def test_tasks_of_the_examples_are_made(monkeypatch):
    from benchmarks import accuracy_tasks, dp_adam, example_files

    example = example_files.load("finetune_transformer")
    for name in ("WIDTH", "HEADS", "LAYERS", "CONTEXT"):  # which dp_adam sets
        monkeypatch.setattr(example, name, getattr(example, name))
    monkeypatch.setattr(accuracy_tasks, "_PRETRAINING_STEPS", 1)
    monkeypatch.setattr(dp_adam, "PRETRAINING_STEPS", 1)
    with jax.numpy_dtype_promotion("standard"):  # as users have it
        assert accuracy_tasks.transformer().num_examples > 1000
        task = dp_adam.transformer()
        assert task.evaluate(task.params) > 1
    assert len(task.records) > 1000
