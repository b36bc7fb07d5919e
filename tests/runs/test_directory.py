"""Whatever happens to a process, a step is paid for if anybody can have seen it."""

import errno
import os
import pathlib
import shutil
import types

import jax
import jax.numpy as jnp
import pytest
from ledgers import charged, file_of, num_steps, steps
from small_runs import killed_copies

from dpmp.runs import Spent, checked_path, opened
from dpmp.runs._ledger import Ledger, write_charge_file

LIKE = {"x": jnp.zeros(3)}


def release(run, start, stop, *, name="a", facts=None):
    state = {"x": jnp.full(3, float(stop))}
    run.release(state, steps(start, stop, run=name), facts or {})


@pytest.fixture(scope="module")
def of_ten(tmp_path_factory):
    """A directory with a checkpoint after ten steps."""
    directory = tmp_path_factory.mktemp("run")
    with opened(directory) as run:
        release(run, 0, 10)
    return directory


@pytest.fixture
def directory(tmp_path, of_ten):
    return shutil.copytree(of_ten, tmp_path / "run")


def newest(directory):
    """The number of steps of the newest checkpoint."""
    with opened(directory) as run:
        (state, facts) = run.newest(LIKE) or (LIKE, {"step": 0})
    assert state["x"].tolist() == 3 * [facts["step"]]
    return facts["step"]


class TestKills:
    def test_the_disk_has_the_record_before_a_release_is_finished(
        self, directory, monkeypatch
    ):
        """A killed process may have written a record, and not have waited for it."""
        with opened(directory) as run:
            release(run, 10, 20)
        (directory / "checkpoints" / "20").rename(directory / "pending")
        calls, fsync, rename = [], os.fsync, os.rename

        def logged_fsync(descriptor):
            calls.append(os.fstat(descriptor).st_ino)
            fsync(descriptor)

        def logged_rename(*args, **kwargs):
            calls.append("rename")
            rename(*args, **kwargs)

        monkeypatch.setattr(os, "fsync", logged_fsync)
        monkeypatch.setattr(os, "rename", logged_rename)
        assert newest(directory) == 20
        inode = file_of(directory).stat().st_ino
        assert calls.index(inode) < calls.index("rename")

    def test_the_disk_has_the_checkpoint_before_its_record(
        self, directory, monkeypatch
    ):
        synced, fsync = [], os.fsync

        def logged(descriptor):
            synced.append(os.fstat(descriptor).st_ino)
            fsync(descriptor)

        with opened(directory) as run:
            monkeypatch.setattr(os, "fsync", logged)
            release(run, 10, 20)
        folder = directory / "checkpoints" / "20"
        record = synced.index(file_of(directory).stat().st_ino)
        files = {x.stat().st_ino for x in (folder, *folder.rglob("*"))}
        assert files <= {*synced[:record]}

    def test_a_checkpoint_that_is_written_again_is_never_missing(
        self, directory, tmp_path
    ):
        """One that is damaged is written again."""
        (directory / "checkpoints" / "10" / "facts.json").write_text("{}")
        with opened(directory) as run, killed_copies(directory, tmp_path) as copies:
            release(run, 0, 10, name="b")
        for copy in [*copies, directory]:
            if len(file_of(copy).read_bytes().splitlines()) == 1:
                continue  # not released yet
            assert newest(copy) == 10
            assert [x.name for x in (copy / "checkpoints").iterdir()] == ["10"]

    def test_a_record_whose_pending_checkpoint_is_damaged_is_warned_of(self, directory):
        with opened(directory) as run:
            release(run, 10, 20)
        pending = directory / "pending"
        (directory / "checkpoints" / "20").rename(pending)
        (pending / "arrays" / "more").touch()
        with pytest.warns(UserWarning, match="paid for steps up to 20"):
            assert newest(directory) == 10
        assert not pending.exists()
        assert num_steps(directory) == 20


def test_one_of_several_processes_leaves_a_slip(directory, monkeypatch):
    with opened(directory) as run:
        before = file_of(directory).read_bytes()
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        run.charge(steps(10, 20, run="b"))
        monkeypatch.undo()
    assert file_of(directory).read_bytes() == before
    assert num_steps(directory) == 20
    with opened(directory) as run:
        assert run.spent == Spent((steps(0, 10), steps(10, 20, run="b")))
    assert len(file_of(directory).read_bytes().splitlines()) == 2
    assert not [*directory.glob("charged-*")]


class TestOpened:
    def test_the_lock_is_free_if_files_are_damaged(self, directory):
        content = file_of(directory).read_bytes()
        file_of(directory).write_bytes(b"?" + content)
        for _ in range(2):
            with pytest.raises(ValueError, match="must be as it was written"):
                opened(directory).__enter__()
        file_of(directory).write_bytes(content)
        assert newest(directory) == 10

    @pytest.mark.parametrize("name", ["file", "file/run", "loop", 300 * "a"])
    def test_a_path_that_cannot_be_a_directory_is_refused(self, tmp_path, name):
        (tmp_path / "file").touch()
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        with pytest.raises(ValueError, match=r"must be a directory, or a name.*reason"):
            checked_path(tmp_path / name)


def test_a_full_disk_has_room_for_one_more_charge(directory, monkeypatch):
    real = os.pwrite

    def pwrite(descriptor, data, offset):
        if (directory / "reserve").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    with opened(directory) as run:
        monkeypatch.setattr(os, "pwrite", pwrite)
        run.charge(steps(10, 15, run="b"))
        monkeypatch.undo()
    assert num_steps(directory) == 15
    with opened(directory):
        assert (directory / "reserve").stat().st_size == 8192


# Files that somebody else has put there.


def test_other_files_damage_nothing(directory):
    (directory / "checkpoints" / "10" / ".DS_Store").write_bytes(b"window")
    (directory / "pending").write_text("a note")
    assert newest(directory) == 10
    assert not (directory / "pending").exists()


def test_an_older_checkpoint_in_the_place_of_pending_is_not_released(directory):
    with opened(directory) as run:
        release(run, 10, 20)
    shutil.copytree(directory / "checkpoints" / "10", directory / "pending")
    assert newest(directory) == 20


def test_checkpoints_of_another_file_system_are_refused(directory, monkeypatch):
    """A rename would fail there, after the steps are paid for."""
    stat_of = pathlib.Path.stat

    def elsewhere(self, **options):
        found = stat_of(self, **options)
        is_there = self.name == "checkpoints"
        changed = {"st_dev": found.st_dev + is_there, "st_mode": found.st_mode}
        return types.SimpleNamespace(**changed)

    monkeypatch.setattr(pathlib.Path, "stat", elsewhere)
    monkeypatch.setattr(pathlib.Path, "exists", os.path.exists)
    with pytest.raises(ValueError, match=r"must be on the file system of.*leave its"):
        opened(directory).__enter__()


@pytest.mark.parametrize("name", ["lock", "reserve", "ledger.jsonl"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_an_error_that_says_what_to_do(tmp_path, name, make):
    make(tmp_path / name)
    with (
        pytest.raises(OSError, match=r"; got file=.*Make room, or make the dir"),
        opened(tmp_path) as run,
    ):
        run.charge(steps(0, 5))


def test_a_run_that_starts_while_the_ledger_is_read_hides_no_slip(
    directory, monkeypatch
):
    write_charge_file(directory, charged(10, 15, run="b"))
    read = pathlib.Path.read_bytes

    def read_late(path):
        monkeypatch.undo()
        content = read(path)
        Ledger(directory).collect()
        return content

    monkeypatch.setattr(pathlib.Path, "read_bytes", read_late)
    assert num_steps(directory) == 15


def test_the_home_directory_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert checked_path("~/runs") == tmp_path / "runs"
