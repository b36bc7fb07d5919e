import errno
import os
import stat

import pytest

from dpmp.runs import _files


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


def test_a_file_is_for_its_owner_alone_and_closed_after_an_error(tmp_path):
    with (
        pytest.raises(KeyError),
        _files.open_file(tmp_path / "a", os.O_RDWR | os.O_CREAT) as descriptor,
    ):
        raise KeyError
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_symbolic_link_is_not_opened(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    with (
        pytest.raises(OSError, match="symbolic links"),
        _files.open_file(tmp_path / "a", os.O_RDWR | os.O_CREAT),
    ):
        pass
    assert not (tmp_path / "b").exists()


def test_an_error_of_the_system_says_what_was_required():
    error = OSError(errno.ENOSPC, "No space left on device", "ledger.jsonl")
    said = "must be so; got file='ledger.jsonl', reason='No space left.*Make room"
    with pytest.raises(OSError, match=said):
        _files.refused("it must be so", error)
    with pytest.raises(OSError, match=r"^said before$"):
        _files.refused("it must be so", OSError("said before"))


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
