import contextlib
import io
import math

import pytest

from dpmp.runs._metrics import MetricsFile, read


def write(directory, steps, *, after=0):
    file = MetricsFile(directory, after)
    for step in steps:
        file.write(step, {"seconds": 2.0 * step, "noisy/loss": 0.5})
    file.close()


def steps_of(directory):
    return [line["step"] for line in read(directory)]


def test_lines_are_read_as_they_were_written(tmp_path):
    assert read(tmp_path) == []
    write(tmp_path, [1])
    assert read(tmp_path) == [{"step": 1, "seconds": 2.0, "noisy/loss": 0.5}]


def test_steps_that_are_made_again_have_one_line(tmp_path):
    write(tmp_path, [2, 4, 6, 8])
    write(tmp_path, [6, 8], after=5)
    assert steps_of(tmp_path) == [2, 4, 6, 8]
    write(tmp_path, [1], after=0)
    assert steps_of(tmp_path) == [1]


def test_the_running_time_goes_on_from_the_last_line_that_is_kept(tmp_path):
    write(tmp_path, [2, 4])
    for step, seconds in ((3, 4.0), (0, 0.0)):
        with contextlib.closing(MetricsFile(tmp_path, step)) as file:
            assert file.seconds == seconds


@pytest.mark.parametrize("torn", [b'{"step": 6, "noi', b'{"step": 6}', b"\xff\x00"])
def test_an_incomplete_last_line_does_no_harm(tmp_path, torn):
    write(tmp_path, [2, 4])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    assert steps_of(tmp_path) == [2, 4]
    write(tmp_path, [6], after=4)
    assert steps_of(tmp_path) == [2, 4, 6]


def test_a_damaged_line_is_left_out(tmp_path):
    write(tmp_path, [2, 4, 6])
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(file.read_bytes().replace(b'"step": 4', b'"step" 4'))
    assert steps_of(tmp_path) == [2, 6]
    file.write_bytes(b"[1]\n3\n" + file.read_bytes())
    assert steps_of(tmp_path) == [2, 6]


def test_numbers_that_are_not_finite_are_null(tmp_path):
    with contextlib.closing(MetricsFile(tmp_path, 0)) as file:
        file.write(1, {"public/a": math.nan, "public/b": math.inf, "public/c": 1.0})
    (line,) = read(tmp_path)
    assert line == {"step": 1, "public/a": None, "public/b": None, "public/c": 1.0}


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    class Full(io.BytesIO):
        def write(self, _):
            raise OSError(28, "No space left on device")

    with contextlib.closing(MetricsFile(tmp_path, 0)) as file:
        file._file.close()
        file._file = Full()
        with pytest.raises(OSError, match=r"metrics.jsonl.*No space left.*Make room"):
            file.write(1, {})


def test_only_the_owner_may_read_the_file(tmp_path):
    write(tmp_path, [1])
    assert (tmp_path / "metrics.jsonl").stat().st_mode & 0o077 == 0
