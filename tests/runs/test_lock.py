import contextlib
import errno
import os

import pytest

from dpmp.runs import _files
from dpmp.runs._files import locked


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


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_does_not_release_the_lock(tmp_path):
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(tmp_path))
        child = os.fork()
        if child == 0:
            stack.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        with pytest.raises(RuntimeError, match="only one run at a time"):
            locked(tmp_path).__enter__()


def test_a_system_without_locks_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(_files, "fcntl", None)
    with pytest.raises(RuntimeError, match=r"POSIX locks.*the operating system has no"):
        locked(tmp_path).__enter__()


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(_files.fcntl, "flock", flock)
    with pytest.raises(RuntimeError, match=r"POSIX locks.*No locks available"):
        locked(tmp_path).__enter__()
