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


@pytest.fixture
def records(tmp_path):
    """A file of 300 short texts."""
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(f'"the 12 in {i}"' for i in range(300)))
    return path
