"""Runs the examples as a command line does, in this process."""

import pytest


@pytest.fixture
def run(monkeypatch):
    """`run(example, *flags)` runs the script of a module."""

    def run_with(example, *flags):
        name = f"{example.__name__}.py"
        monkeypatch.setattr("sys.argv", [name, *map(str, flags)])
        example.main()

    return run_with
