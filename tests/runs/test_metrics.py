import errno
import os

import pytest

from dpmp.runs._metrics import MetricsFile, read


def line(step):
    return {"step": step, "seconds": 2.0 * step, "noisy/loss": 0.5}


def write(directory, steps, *, after=0, from_checkpoint=()):
    file = MetricsFile(directory, [line(x) for x in from_checkpoint], after)
    for step in steps:
        file.append([line(step)])


def steps_of(directory):
    return [x["step"] for x in read(directory)]


def test_steps_that_are_made_again_have_one_line(tmp_path):
    write(tmp_path, [2, 4, 6, 8])
    write(tmp_path, [6, 8], after=5)
    assert steps_of(tmp_path) == [2, 4, 6, 8]
    write(tmp_path, [1], after=0)
    assert steps_of(tmp_path) == [1]


def test_lines_that_were_lost_come_from_the_checkpoint(tmp_path):
    """A kill between the rename of the checkpoint and the metrics."""
    write(tmp_path, [2, 4])
    write(tmp_path, [10], after=8, from_checkpoint=[4, 6, 8])
    assert steps_of(tmp_path) == [2, 4, 6, 8, 10]
    (tmp_path / "metrics.jsonl").unlink()
    write(tmp_path, [], after=10, from_checkpoint=[8, 10])
    assert steps_of(tmp_path) == [8, 10]


def test_the_running_time_goes_on_from_the_last_line_that_is_kept(tmp_path):
    write(tmp_path, [2, 4])
    for step, seconds in ((4, 8.0), (3, 4.0), (0, 0.0)):
        assert MetricsFile(tmp_path, [], step).seconds == seconds


@pytest.mark.parametrize("torn", [b'{"step": 6, "noi', b'{"step": 6}', b"\xff\x00"])
def test_an_incomplete_last_line_does_no_harm(tmp_path, torn):
    write(tmp_path, [2, 4])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    assert steps_of(tmp_path) == [2, 4]
    write(tmp_path, [6], after=6)
    assert steps_of(tmp_path) == [2, 4, 6]


def test_a_damaged_line_is_left_out(tmp_path):
    write(tmp_path, [2, 4, 6])
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(file.read_bytes().replace(b'"step": 4', b'"step" 4'))
    assert steps_of(tmp_path) == [2, 6]
    odd = b'[1]\n3\n{"step": 1, "seconds": "a"}\n' + 9**5 * b"[" + b"\n"
    file.write_bytes(odd + file.read_bytes())
    assert steps_of(tmp_path) == [2, 6]


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, monkeypatch):
    file = MetricsFile(tmp_path, [line(1)], 1)

    def pwrite(*args):
        raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")

    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", pwrite)
    said = r"metrics of a run must be written.*metrics.jsonl.*No space.*Make room"
    with pytest.raises(OSError, match=said):
        file.append([line(2)])
    # Short writes are continued.
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:7], at))
    file.append([line(2)])
    assert steps_of(tmp_path) == [1, 2]
