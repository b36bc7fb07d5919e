import dataclasses
import json
import stat

import jax
import numpy as np
import pytest
from ledgers import DELTA, MECHANISM, entry_of, file_of, num_steps, write_three

from dpmp.runs import Ledger


def test_a_record_can_be_read_without_dpmp(tmp_path):
    write_three(tmp_path)
    lines = file_of(tmp_path).read_text().splitlines()
    record = json.loads(lines[1])
    assert len(record.pop("checksum")) == 32
    assert record.pop("time").endswith("+00:00")
    assert record.pop("dpmp") == "0.1.0"
    assert record.pop("jax") == jax.__version__
    assert record == {
        "format": 1,
        "event": "begin",
        "key": "key",
        "data": "data",
        "start": 10,
        "stop": 20,
        "delta": DELTA,
        "cost": {
            "sampling_prob": 1.0,
            "num_examples": 1000,
            "truncated_batch_size": 1000,
            "noise_multiplier": 20.0,
            "is_clipped": True,
            "num_coordinates": MECHANISM.num_parameters + 3,
            "neighboring_relation": "REPLACE_SPECIAL",
        },
    }


def test_costs_are_read_as_they_were_written(tmp_path):
    noise = np.nextafter(0.1, 1) + 20
    mechanism = dataclasses.replace(
        MECHANISM, noise_multiplier=noise, sampling_prob=1 / 3
    )
    entry_of(Ledger.open(tmp_path), mechanism).begin(0, 1)
    assert Ledger.open(tmp_path).runs[0].cost == mechanism.step_cost


def test_only_the_owner_can_read_it(tmp_path):
    write_three(tmp_path)
    assert stat.S_IMODE(file_of(tmp_path).stat().st_mode) == 0o600


def test_an_incomplete_last_record_never_began(tmp_path):
    content = write_three(tmp_path)
    second = content.index(b"\n", content.index(b"\n") + 1) + 1
    for size in range(second, len(content)):
        file_of(tmp_path).write_bytes(content[:size])
        # Only the newline is missing from the last of these.
        expected = 30 if size == len(content) - 1 else 20
        ledger = Ledger.open(tmp_path)
        assert sum(run.num_steps for run in ledger.runs) == expected
        assert file_of(tmp_path).stat().st_size == size
        entry_of(ledger).begin(expected, 40)
        lines = file_of(tmp_path).read_bytes().splitlines()
        assert len(lines) == expected // 10 + 1
        assert num_steps(tmp_path) == 40


@pytest.mark.parametrize("lost", [0, 1, 100])
def test_a_file_that_ends_with_zeros_is_read_up_to_them(tmp_path, lost):
    """After a power failure, some file systems leave zeros for unwritten bytes."""
    content = write_three(tmp_path)[: -lost or None]
    file_of(tmp_path).write_bytes(content + bytes(512))
    expected = 20 if lost == 100 else 30
    assert num_steps(tmp_path) == expected
    entry_of(Ledger.open(tmp_path)).begin(expected, 40)
    assert num_steps(tmp_path) == 40
    assert b"\0" not in file_of(tmp_path).read_bytes()


def test_a_record_of_which_the_disk_has_only_the_end_never_began(tmp_path):
    """Also if the newline before it was lost together with its beginning."""
    content = write_three(tmp_path)
    second = content.index(b"\n", content.index(b"\n") + 1)
    torn = content[:second] + bytes(100) + content[second + 100 : -1]
    file_of(tmp_path).write_bytes(torn)
    assert num_steps(tmp_path) == 20


def test_every_changed_byte_is_noticed(tmp_path):
    content = write_three(tmp_path)
    for place in range(0, len(content), 7):
        changed = bytearray(content)
        changed[place] ^= 1
        file_of(tmp_path).write_bytes(changed)
        line = content[:place].count(b"\n") + 1
        if changed[place] == 0x0B and line == 3:
            assert num_steps(tmp_path) == 30  # the last newline need not be there
            continue
        # A record whose newline was changed still ends with its checksum.
        line += content[place] == ord("\n")
        with pytest.raises(ValueError, match=rf"as it was written.* line {line}'"):
            Ledger.open(tmp_path)


@pytest.mark.parametrize("order", [(1, 2), (0, 2), (1, 0, 2), (0, 1, 1)])
def test_lines_that_are_missing_or_moved_are_noticed(tmp_path, order):
    lines = write_three(tmp_path).splitlines(keepends=True)
    file_of(tmp_path).write_bytes(b"".join(lines[i] for i in order))
    with pytest.raises(ValueError, match="as it was written"):
        Ledger.open(tmp_path)


def test_another_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("dpmp.runs._records._FORMAT", 2)
    write_three(tmp_path)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"must have format 1.*line 1"):
        Ledger.open(tmp_path)


def test_a_record_with_other_fields_is_refused(tmp_path, monkeypatch):
    real = json.dumps
    monkeypatch.setattr(
        "dpmp.runs._records.json.dumps", lambda x, **k: real(x | {"more": 1}, **k)
    )
    write_three(tmp_path)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="must have the fields of format 1"):
        Ledger.open(tmp_path)
