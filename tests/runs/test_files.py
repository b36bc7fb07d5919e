"""Files and directories reach the disk, and one process at a time writes them."""

import contextlib
import errno
import os
import stat

import pytest

from dpmp.runs import _files
from dpmp.runs._files import locked


@pytest.fixture
def synced(monkeypatch):
    """The paths that `os.fsync` was called with."""
    paths = []
    real = os.fsync

    def fsync(descriptor):
        paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="Linux only")
def test_new_directories_reach_the_disk_and_are_for_their_owner(tmp_path, synced):
    _files.make_directory(tmp_path / "a" / "b")
    _files.make_directory(tmp_path / "a" / "b")
    assert synced == [str(tmp_path), str(tmp_path / "a")]
    for path in (tmp_path / "a", tmp_path / "a" / "b"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="Linux only")
def test_every_file_of_a_tree_reaches_the_disk_before_its_folder(tmp_path, synced):
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("x", "a/y", "a/b/z"):
        (tmp_path / name).touch()
    _files.sync_tree(tmp_path)
    everything = [tmp_path, *tmp_path.rglob("*")]
    assert sorted(synced) == sorted(map(str, everything))
    for path in everything[1:]:
        assert synced.index(str(path)) < synced.index(str(path.parent))


def test_a_digest_depends_on_the_names_and_contents_alone(tmp_path):
    contents = [
        {"x": b"1", "a/y": b"2"},
        {"x": b"2", "a/y": b"1"},
        {"x": b"1", "a/z": b"2"},
        {"x": b"1", "a/y": b"2", "w": b""},
        {"x": b"12", "a/y": b""},
        {"xa/y": b"12"},
        {},
    ]
    digests = []
    for number in (*range(len(contents)), 0):
        folder = tmp_path / str(len(digests))
        folder.mkdir()
        for name, content in contents[number].items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        digests.append(_files.digest_of_tree(folder))
    assert len({*digests}) == len(contents)
    assert digests[0] == digests[-1]


# The lock.


def test_the_lock_is_exclusive_and_names_its_owner(tmp_path):
    text = rf"only one run.*{tmp_path.name}.*process {os.getpid()} on"
    with locked(tmp_path):
        for _ in range(2):  # who fails does not remove the name
            with pytest.raises(RuntimeError, match=text):
                locked(tmp_path).__enter__()
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


def test_systems_without_locks_are_refused(tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(_files.fcntl, "flock", flock)
    with pytest.raises(RuntimeError, match=r"POSIX locks.*No locks available"):
        locked(tmp_path).__enter__()
    monkeypatch.setattr(_files, "fcntl", None)
    with pytest.raises(RuntimeError, match=r"POSIX locks.*the operating system has no"):
        locked(tmp_path).__enter__()
