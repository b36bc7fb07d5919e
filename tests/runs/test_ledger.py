"""The ledger has every step that was paid for, whatever happens to the machine."""

import errno
import json
import os
import stat

import pytest
from ledgers import DELTA, MECHANISM, charged, file_of, num_steps, steps, write_three

from dpmp.runs import Spent, _ledger
from dpmp.runs._ledger import Ledger, Record, write_charge_file


class TestRecords:
    def test_a_record_can_be_read_without_dpmp(self, tmp_path):
        record = Record(
            event="released",
            segment=steps(10, 20),
            delta=DELTA,
            nonce="of the checkpoint",
            digest="of its files",
        )
        Ledger(tmp_path).append(record)
        fields = json.loads(file_of(tmp_path).read_text())
        assert len(fields.pop("checksum")) == 32
        assert fields.pop("time").endswith("+00:00")
        assert fields == {
            "format": 3,
            "event": "released",
            "segment": {
                "id": 32 * "a",
                "start": 10,
                "stop": 20,
                "planned": 100,
                "cost": {
                    "sampling_prob": 1.0,
                    "num_examples": 1000,
                    "truncated_batch_size": 1000,
                    "noise_multiplier": 20.0,
                    "is_clipped": True,
                    "num_coordinates": MECHANISM.num_parameters + 3,
                    "neighboring_relation": "REPLACE_SPECIAL",
                    "sampling": "poisson",
                    "cycle_length": 1,
                },
            },
            "delta": DELTA,
            "nonce": "of the checkpoint",
            "digest": "of its files",
        }


class TestPowerFailures:
    def test_the_disk_has_the_record_when_append_returns(self, tmp_path, monkeypatch):
        synced = []
        real = os.fsync

        def fsync(descriptor):
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
            synced.append(file_of(tmp_path).read_bytes() if is_file else "directory")
            real(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)
        first, second, third = write_three(tmp_path).splitlines(keepends=True)
        # A newline follows when the disk has the line.
        assert synced[:2] == [first[:-1], "directory"]
        lines = [first + second[:-1], first + second + third[:-1]]
        assert synced[-2:] == lines

    def test_an_incomplete_last_record_is_free_and_replaced(
        self, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # it takes its time
        content = write_three(tmp_path)
        second = content.index(b"\n", content.index(b"\n") + 1) + 1
        for size in range(second, len(content) - 1, 7):
            file_of(tmp_path).write_bytes(content[:size])
            ledger = Ledger(tmp_path)
            assert ledger.spent == Spent((steps(0, 20),))
            assert ledger.incomplete_bytes == size - second
            assert file_of(tmp_path).stat().st_size == size  # reading changes nothing
            ledger.append(charged(20, 40))
            assert len(file_of(tmp_path).read_bytes().splitlines()) == 3
            assert num_steps(tmp_path) == 40

    def test_a_whole_record_counts_without_its_newline(self, tmp_path):
        assert Ledger(tmp_path).copy() == b""
        content = write_three(tmp_path)
        file_of(tmp_path).write_bytes(content + b'{"format": 3, "eve')
        assert Ledger(tmp_path).copy() == content.rstrip()
        file_of(tmp_path).write_bytes(content[:-1])
        assert num_steps(tmp_path) == 30
        ledger = Ledger(tmp_path)
        ledger.append(charged(30, 40))
        ledger.append(charged(40, 45))
        assert num_steps(tmp_path) == 45
        assert file_of(tmp_path).read_bytes().startswith(content)

    @pytest.mark.parametrize("lost", [2, 100, "middle"])
    def test_a_file_with_zeros_is_read_up_to_them(self, tmp_path, lost):
        """After a power failure, some file systems leave zeros for unwritten bytes."""
        content = write_three(tmp_path)
        if lost == "middle":
            content = content[:-150] + bytes(100) + content[-50:-1]
        else:
            content = content[:-lost] + bytes(512)
        file_of(tmp_path).write_bytes(content)
        assert num_steps(tmp_path) == 20
        Ledger(tmp_path).append(charged(20, 40))
        assert num_steps(tmp_path) == 40
        assert b"\0" not in file_of(tmp_path).read_bytes()

    @pytest.mark.parametrize("room", [0, 1, 200, "all but the last byte"])
    def test_a_full_disk_is_an_error_and_leaves_the_records(
        self, tmp_path, monkeypatch, room
    ):
        ledger = Ledger(tmp_path)
        ledger.append(charged(10, 20))
        before = file_of(tmp_path).read_bytes()
        real, left = os.pwrite, [room]
        if room == "all but the last byte":
            left = [len(before)]  # of another line with as many bytes

        def pwrite(descriptor, data, offset):
            if left[0] == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            number = real(descriptor, data[: min(left[0], 7)], offset)  # a short write
            left[0] -= number
            return number

        monkeypatch.setattr(os, "pwrite", pwrite)
        said = r"before they are released; got .*No space left.*Make room"
        for one in (ledger, Ledger(tmp_path / "gone")):
            with pytest.raises(OSError, match=said if one is ledger else "before they"):
                one.append(charged(20, 40))
        left[0] = 10**6
        assert file_of(tmp_path).read_bytes() == before.rstrip()
        assert num_steps(tmp_path) == 10
        ledger.append(charged(10, 40))
        monkeypatch.undo()
        assert num_steps(tmp_path) == 30


class TestDamage:
    def test_every_changed_byte_is_noticed(self, tmp_path):
        content = write_three(tmp_path)
        for place in range(0, len(content) - 1, 7):
            changed = bytearray(content)
            changed[place] ^= 1
            file_of(tmp_path).write_bytes(changed)
            line = content[:place].count(b"\n") + 1
            with pytest.raises(ValueError, match=rf"as it was written.*line {line}'"):
                Ledger(tmp_path)

    @pytest.mark.parametrize("order", [(1, 2), (0, 2), (1, 0, 2), (0, 1, 1)])
    def test_lines_that_are_missing_or_moved_are_noticed(self, tmp_path, order):
        lines = write_three(tmp_path).splitlines(keepends=True)
        file_of(tmp_path).write_bytes(b"".join(lines[i] for i in order))
        with pytest.raises(ValueError, match=r"as it was written.*Restore the file"):
            Ledger(tmp_path)

    def test_other_formats_and_fields_are_refused(self, tmp_path, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(_ledger, "_FORMAT", 2)
            patch.setattr(_ledger, "segment_as_json", lambda _: {"is_in_order": True})
            write_three(tmp_path)
        with pytest.raises(ValueError, match=r"must have format 3.*line 1"):
            Ledger(tmp_path)
        file_of(tmp_path).unlink()
        with monkeypatch.context() as patch:
            dumps = json.dumps
            patch.setattr(json, "dumps", lambda x, **k: dumps(x | {"more": 1}, **k))
            write_three(tmp_path)
        with pytest.raises(ValueError, match=r"as it was written.*line 1"):
            Ledger(tmp_path)

    def test_a_second_writer_is_noticed(self, tmp_path):
        one, two = Ledger(tmp_path), Ledger(tmp_path)
        one.append(charged(0, 10))
        with pytest.raises(RuntimeError, match="only the run that holds the lock"):
            two.append(charged(0, 10))
        file_of(tmp_path).unlink()
        with pytest.raises(RuntimeError, match="only the run that holds the lock"):
            one.append(charged(10, 20))


class TestSlips:
    """Charges that processes without the lock have left."""

    def test_slips_are_counted_and_moved_into_the_file(self, tmp_path):
        Ledger(tmp_path).append(charged(0, 10))
        for run in "bbc":  # two processes pay for the same steps
            write_charge_file(tmp_path, charged(10, 20, run=run))
        slips = [steps(10, 20, run=x) for x in "bc"]
        expected = Spent((steps(0, 10), *slips))
        ledger = Ledger(tmp_path)
        assert {*ledger.spent.segments} == {*expected.segments}
        assert len(file_of(tmp_path).read_bytes().splitlines()) == 1
        ledger.collect()
        assert len(file_of(tmp_path).read_bytes().splitlines()) == 4
        assert [x.name for x in tmp_path.iterdir()] == ["ledger.jsonl"]
        for again in (ledger, Ledger(tmp_path)):
            assert {*again.spent.segments} == {*expected.segments}

    def test_a_slip_that_is_moved_twice_counts_once(self, tmp_path):
        """A kill between the record and the removal of the slip."""
        write_charge_file(tmp_path, charged(10, 20))
        (slip,) = tmp_path.iterdir()
        content = slip.read_bytes()
        Ledger(tmp_path).collect()
        slip.write_bytes(content)
        ledger = Ledger(tmp_path)
        ledger.collect()
        assert len(ledger.records) == 2
        assert num_steps(tmp_path) == 10

    def test_a_slip_counts_when_it_is_whole(self, tmp_path, monkeypatch):
        def fsync(descriptor):
            raise OSError(errno.EIO, "I/O error")

        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(OSError, match="I/O error"):
            write_charge_file(tmp_path, charged(10, 20))
        assert num_steps(tmp_path) == 0

    def test_a_damaged_slip_is_refused_by_name(self, tmp_path):
        write_charge_file(tmp_path, charged(10, 20))
        (slip,) = tmp_path.iterdir()
        assert stat.S_IMODE(slip.stat().st_mode) == 0o600
        slip.write_bytes(slip.read_bytes()[:-9])
        with pytest.raises(ValueError, match=rf"as it was written.*{slip.name}"):
            Ledger(tmp_path)
