"""The privacy ledger: an append-only file of the steps that were paid for.

A line is a JSON object. It ends with a checksum of itself and of the checksum before,
so that a line that was changed, left out or moved is noticed. This is against
accidents: anyone who may write the file can also compute new checksums.
"""

import dataclasses
import datetime
import hashlib
import json
import os
import pathlib
import re
from typing import Any, NamedTuple, NoReturn

import dp_accounting

from dpmp import _validate
from dpmp.mechanism import StepCost
from dpmp.runs._files import open_file, refused, sync, write_at
from dpmp.runs._spent import Segment, Spent

NAME = "ledger.jsonl"
_SLIPS = "charged-*.json"
_FORMAT = 2
_LINE = re.compile(rb'(\{[^\n]*?), "checksum": "([0-9a-f]{32})"\}\n?')
_WHAT_TO_DO = "Restore the file from a copy: it is the only account of these steps."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """States that steps are paid for.

    Attributes:
      event: "released" with a checkpoint, or "charged" without one.
      segment: the steps, and their cost.
      delta: the delta that the run was planned for, or None.
      nonce: identifies the checkpoint; empty without one.
      digest: a hash of the files of the checkpoint; empty without one.
      time: in UTC (ISO 8601).
    """

    event: str
    segment: Segment
    delta: float | None
    nonce: str = ""
    digest: str = ""
    time: str = ""


class _Content(NamedTuple):
    """What a ledger's file contains.

    Attributes:
      records: all whole records.
      checksum: that of the last record.
      end: where the last record ends.
      size: the size of the file, which is larger if the last record is incomplete.
      has_newline: whether a newline follows the last record.
    """

    records: list[Record]
    checksum: bytes
    end: int
    size: int
    has_newline: bool


class Ledger:
    """Reads the ledger of a directory, and appends to it under the directory's lock.

    Guarantees:
      When `append` returns, the disk has the record. A process that is killed at any
      instant, or a machine that loses power, leaves whole records, and at most one
      incomplete record after them. The next record replaces that one.

      The file has no keys, and nothing that was computed from private data. It states
      `num_examples`, which is protected under ADD_OR_REMOVE_ONE.

    Raises:
      ValueError: if the file is damaged.
    """

    def __init__(self, directory: pathlib.Path):
        self._file = directory / NAME
        content = self._file.read_bytes() if self._file.exists() else b""
        self._content = _parse(content, str(self._file))
        self._slips = sorted(directory.glob(_SLIPS))
        on_slips = [_decode(x.read_bytes(), str(x)) for x in self._slips]
        self.records = [*self._content.records, *on_slips]

    @property
    def exists(self) -> bool:
        """Whether anything was ever written."""
        return self._content.size > 0 or bool(self.records)

    @property
    def spent(self) -> Spent:
        """All steps that were paid for."""
        return Spent(tuple(x.segment for x in self.records)) | Spent()

    @property
    def incomplete_bytes(self) -> int:
        """The length of an incomplete record at the end, whose steps are free."""
        return self._content.size - self._content.end

    @property
    def times(self) -> list[str]:
        """When the records were written, ascending."""
        return sorted(x.time for x in self.records)

    def released(self, nonce: str) -> Record | None:
        """The record of the checkpoint with this nonce."""
        found = (x for x in self.records if x.event == "released" and x.nonce == nonce)
        return next(found, None)

    def copy(self) -> bytes:
        """The whole records of the file."""
        content = self._file.read_bytes() if self._file.exists() else b""
        return content[: self._content.end]

    def collect(self) -> None:
        """Moves the records that other processes have left into the file.

        An incomplete record, which may say something about free steps, is removed.
        """
        if self.incomplete_bytes:
            os.truncate(self._file, self._content.end)
            self._content = self._content._replace(size=self._content.end)
        new = self.records[len(self._content.records) :]
        del self.records[len(self._content.records) :]
        for record, slip in zip(new, self._slips, strict=True):
            self.append(record)
            slip.unlink()

    def append(self, record: Record) -> None:
        """Appends a record; the disk then has it.

        Raises:
          OSError: if it cannot be written. The file stays as it was.
          RuntimeError: if somebody else has changed the file.
        """
        text, before = _encode(record), self._content
        checksum = _checksum(text, before.checksum)
        line = text + b', "checksum": "' + checksum + b'"}'
        if not before.has_newline:
            line = b"\n" + line
        try:
            with open_file(self._file, os.O_RDWR | os.O_CREAT) as descriptor:
                self._check_unchanged(descriptor)
                os.ftruncate(descriptor, before.end)
                try:
                    _write(descriptor, line, before.end)
                except OSError:
                    os.ftruncate(descriptor, before.end)
                    self._content = before._replace(size=before.end)
                    raise
                if before.end == 0:
                    sync(self._file.parent)
                end = before.end + len(line)
                write_at(descriptor, b"\n", end)  # only after the disk has the line
        except OSError as error:
            refused("steps must be in the ledger before they are released", error)
        self.records.append(record)
        records = [*before.records, record]
        self._content = _Content(records, checksum, end + 1, end + 1, True)

    def _check_unchanged(self, descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        _validate.require(
            size == self._content.size,
            "only the run that holds the lock may write its ledger",
            file=str(self._file),
            expected_bytes=self._content.size,
            bytes=size,
            fix="Start the run again.",
            error=RuntimeError,
        )


def leave_slip(directory: pathlib.Path, record: Record) -> None:
    """Charges steps by a file of its own, which the next `Ledger` counts.

    A process that does not hold the lock pays in this way.

    Raises:
      OSError: if it cannot be written.
    """
    name = f"charged-{os.urandom(16).hex()}"
    with open_file(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
        _write(file, _encode(record) + b"}", 0)
    os.rename(directory / name, directory / f"{name}.json")
    sync(directory)


def _write(descriptor: int, content: bytes, place: int) -> None:
    write_at(descriptor, content, place)
    os.fsync(descriptor)


def _encode(record: Record) -> bytes:
    """The JSON of a record, without the brace at its end."""
    fields = dataclasses.asdict(record)
    cost = record.segment.cost
    fields["segment"]["cost"]["neighboring_relation"] = cost.neighboring_relation.name
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    fields["time"] = record.time or now
    # Python writes floats so that reading them gives the same floats.
    return json.dumps({"format": _FORMAT, **fields}, allow_nan=False)[:-1].encode()


def _decode(text: bytes, place: str) -> Record:
    try:
        fields: dict[str, Any] = json.loads(text)
        written_by = fields.pop("format")
        segment = fields.pop("segment")
        cost = segment.pop("cost")
        relation = dp_accounting.NeighboringRelation[cost.pop("neighboring_relation")]
        cost = StepCost(neighboring_relation=relation, **cost)
        record = Record(segment=Segment(cost=cost, **segment), **fields)
    except (AttributeError, KeyError, TypeError, ValueError):
        _damaged(place)
    _validate.require(
        written_by == _FORMAT,
        f"a ledger must have format {_FORMAT}",
        line=place,
        fix="Read it with the version of dpmp that wrote it.",
    )
    return record


def _parse(content: bytes, file: str) -> _Content:
    """Reads the lines of a ledger.

    The last record may be incomplete, because the machine stopped while it was written.
    It has no newline then, which is written only after the disk has the record. So its
    steps were not released.
    """
    records, checksum, end = [], b"", 0
    while line := _LINE.match(content, end):
        if line[2] != _checksum(line[1], checksum):
            break
        checksum, end = line[2], line.end()
        records.append(_decode(line[1] + b"}", f"{file}, line {len(records) + 1}"))
    if b"\n" in content[end:]:
        _damaged(f"{file}, line {len(records) + 1}")
    has_newline = end == 0 or content[end - 1 : end] == b"\n"
    return _Content(records, checksum, end, len(content), has_newline)


def _damaged(place: str) -> NoReturn:
    _validate.fail(
        "every record of a ledger must be as it was written",
        damaged=place,
        fix=_WHAT_TO_DO,
    )


def _checksum(text: bytes, previous: bytes) -> bytes:
    return hashlib.blake2b(previous + text, digest_size=16).hexdigest().encode()
