import contextlib
import errno
import itertools
import multiprocessing
import os
import random
import stat
import time

import pytest
from ledgers import entry_of, file_of, num_steps, write_three

from dpmp import runs
from dpmp.runs import Ledger


def test_the_disk_has_the_record_before_the_step(tmp_path, monkeypatch):
    synced = []
    real = os.fsync

    def fsync(descriptor):
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        synced.append(file_of(tmp_path).read_bytes() if is_file else "directory")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    content = write_three(tmp_path)
    first, second, third = content.splitlines(keepends=True)
    assert synced == [
        first[:-1],
        "directory",
        first + second[:-1],
        first + second + third[:-1],
    ]


@pytest.mark.parametrize("room", [0, 1, 200])
def test_a_full_disk_stops_the_run_before_the_step(tmp_path, monkeypatch, room):
    entry = entry_of(Ledger.open(tmp_path))
    entry.begin(0, 10)
    real, left = os.pwrite, [room]

    def pwrite(descriptor, data, offset):
        if left[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        number = real(descriptor, data[: left[0]], offset)
        left[0] -= number
        return number

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match=r"before they begin; got .*No space left"):
        entry.begin(10, 20)
    monkeypatch.undo()
    assert num_steps(tmp_path) == 10
    entry_of(Ledger.open(tmp_path)).begin(10, 20)
    assert num_steps(tmp_path) == 20


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:7], at))
    write_three(tmp_path)
    assert num_steps(tmp_path) == 30


def test_a_newline_that_does_not_fit_is_not_needed(tmp_path, monkeypatch):
    real = os.pwrite

    def pwrite(descriptor, data, offset):
        if data == b"\n":
            raise OSError(errno.ENOSPC, "full")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    content = write_three(tmp_path)
    assert content.count(b"\n") == 2
    assert num_steps(tmp_path) == 30


def test_a_record_that_may_not_be_on_the_disk_is_an_error(tmp_path, monkeypatch):
    def fsync(descriptor):
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(os, "fsync", fsync)
    entry = entry_of(Ledger.open(tmp_path))
    with pytest.raises(OSError, match=r"before they begin; got .*I/O error"):
        entry.begin(0, 10)
    with pytest.raises(RuntimeError, match="only the run that holds the lock"):
        entry.begin(0, 10)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory_stops_the_run(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="before they begin"):
        entry_of(Ledger.open(tmp_path)).begin(0, 10)


def test_a_directory_that_is_gone_stops_the_run(tmp_path):
    with pytest.raises(OSError, match="before they begin"):
        entry_of(Ledger.open(tmp_path / "gone")).begin(0, 10)


def test_a_second_writer_is_noticed(tmp_path):
    one, two = (entry_of(Ledger.open(tmp_path)) for _ in range(2))
    one.begin(0, 10)
    with pytest.raises(RuntimeError, match="only the run that holds the lock"):
        two.begin(0, 10)
    file_of(tmp_path).unlink()
    with pytest.raises(RuntimeError, match="only the run that holds the lock"):
        one.begin(10, 20)


def write_until_killed(directory, sender):
    with runs.locked(directory):
        ledger = Ledger.open(directory)
        entry = entry_of(ledger)
        for step in itertools.count(sum(run.num_steps for run in ledger.runs)):
            entry.begin(step, step + 1)
            sender.send(step + 1)


@pytest.mark.parametrize(
    "kills", [8, pytest.param(100, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_a_killed_run_leaves_a_ledger_with_every_step(tmp_path, kills):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dpmp.runs"])
    delays = random.Random(7)
    for _ in range(kills):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=write_until_killed, args=(tmp_path, sender))
        process.start()
        sender.close()
        begun = receiver.recv()
        with pytest.raises(RuntimeError, match=f"process {process.pid} on"):
            runs.locked(tmp_path).__enter__()
        time.sleep(delays.uniform(0, 0.02))
        process.kill()
        process.join()
        with contextlib.suppress(EOFError):
            while True:
                begun = receiver.recv()
        assert begun <= num_steps(tmp_path) <= begun + 1
        with runs.locked(tmp_path):  # the lock is free at once
            pass
