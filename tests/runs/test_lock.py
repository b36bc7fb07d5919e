import os
import stat

import pytest

from dpmp import runs
from dpmp.runs import _lock


def test_a_directory_is_made_for_its_owner(tmp_path):
    with runs.locked(tmp_path / "some" / "run") as directory:
        assert directory == tmp_path / "some" / "run"
        for path in (directory, directory.parent):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert stat.S_IMODE((directory / "lock").stat().st_mode) == 0o600


def test_the_lock_is_exclusive_and_names_its_owner(tmp_path):
    with runs.locked(tmp_path):
        text = rf"only one process.*{tmp_path.name}.*process {os.getpid()} on"
        with pytest.raises(RuntimeError, match=text):
            runs.locked(tmp_path).__enter__()
    with runs.locked(tmp_path):
        pass


def test_the_lock_is_free_after_an_error(tmp_path):
    with pytest.raises(KeyError), runs.locked(tmp_path):
        raise KeyError
    with runs.locked(tmp_path):
        pass


def test_a_system_without_locks_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(_lock, "fcntl", None)
    with pytest.raises(RuntimeError, match="must have the file locks of POSIX"):
        runs.locked(tmp_path).__enter__()
