import errno
import os
import stat

import pytest

from dpmp.runs import _lock
from dpmp.runs._lock import locked


def test_a_directory_is_made_for_its_owner(tmp_path):
    directory = tmp_path / "some" / "run"
    with locked(directory):
        for path in (directory, directory.parent):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert stat.S_IMODE((directory / "lock").stat().st_mode) == 0o600


def test_the_lock_is_exclusive_and_names_its_owner(tmp_path):
    text = rf"only one run.*{tmp_path.name}.*process {os.getpid()} on"
    with locked(tmp_path):
        for _ in range(2):  # who fails does not remove the name
            with pytest.raises(RuntimeError, match=text):
                locked(tmp_path).__enter__()
    with locked(tmp_path):
        pass


def test_the_lock_is_free_after_an_error(tmp_path):
    with pytest.raises(KeyError), locked(tmp_path):
        raise KeyError
    with locked(tmp_path):
        pass


def test_a_system_without_locks_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(_lock, "fcntl", None)
    with pytest.raises(RuntimeError, match=r"POSIX locks.*the operating system has no"):
        locked(tmp_path).__enter__()


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(_lock.fcntl, "flock", flock)
    with pytest.raises(RuntimeError, match=r"POSIX locks.*No locks available"):
        locked(tmp_path).__enter__()


def test_a_symbolic_link_is_not_locked_nor_written_to(tmp_path):
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        locked(tmp_path / "run").__enter__()
    assert target.read_text() == "precious"
