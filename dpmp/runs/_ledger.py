"""The privacy ledger: an append-only file of the steps that were paid for.

A line is a JSON object. It ends with a checksum of itself and of the checksum before.
So a reader notices lines that were changed, removed or moved. This protects against
accidents only: anyone who may write the file can also compute new checksums.
"""

import contextlib
import dataclasses
import datetime
import fnmatch
import hashlib
import json
import os
import pathlib
import re
from typing import Any, NamedTuple, NoReturn

from dpmp import _validate
from dpmp.runs._files import (
    files_required,
    names_in,
    open_file,
    read_if_any,
    sync,
    write_at,
)
from dpmp.runs._spent import Segment, Spent, segment_as_json, segment_from_json

NAME = "ledger.jsonl"
_CHARGE_FILES = "charged-*.json"
_FORMAT = 3
_NO_RECORD = AttributeError, KeyError, RecursionError, TypeError, ValueError
_LINE = re.compile(rb'\n?(\{[^\n]*?), "checksum": "([0-9a-f]{32})"\}')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """States that steps are paid for."""

    event: str  # "released" with a checkpoint, or "charged" without one
    segment: Segment
    delta: float | None  # for which the run was planned
    nonce: str = ""  # identifies the checkpoint
    digest: str = ""  # a hash of the files of the checkpoint
    time: str = ""  # in UTC (ISO 8601)


class _Whole(NamedTuple):
    """The whole records of a file, and the checksum and the end of the last one."""

    records: list[Record]
    checksum: bytes
    end: int


class Ledger:
    """Reads the ledger of a directory, and appends to it under the directory's lock.

    Guarantees:
      When `append` returns, the disk has the record. A process that is killed at any
      instant, or a machine that loses power, leaves whole records, and at most one
      incomplete record after them. The next record replaces that one.

      The file has no keys, and nothing that was computed from private data. It states
      `num_examples`, which is protected under ADD_OR_REMOVE_ONE.
    """

    def __init__(self, directory: pathlib.Path):
        self._file = directory / NAME
        # They are read before the file: a run that starts now moves them into it.
        self._charge_files = _charge_files(directory)
        content = read_if_any(self._file)
        self._whole, self._size = _parse(content, str(self._file)), len(content)

    @property
    def records(self) -> list[Record]:
        """The records of the file, and those in separate files of other processes."""
        return [*self._whole.records, *self._charge_files.values()]

    @property
    def exists(self) -> bool:
        """Whether anything was ever written."""
        return self._size > 0 or bool(self._charge_files)

    @property
    def incomplete_bytes(self) -> int:
        """The length of an incomplete record at the end, whose steps are free."""
        newline = int(self._whole.end > 0)
        return max(0, self._size - self._whole.end - newline)

    @property
    def spent(self) -> Spent:
        """All steps that were paid for."""
        return Spent.of(x.segment for x in self.records)

    @property
    def releases(self) -> dict[str, Record]:
        """The records of checkpoints by their nonces, the newest one last."""
        return {x.nonce: x for x in self.records if x.event == "released"}

    def copy(self) -> bytes:
        """The whole records of the file."""
        return read_if_any(self._file)[: self._whole.end]

    def collect(self) -> None:
        """Moves the records in separate files of other processes into the file."""
        if self.incomplete_bytes:  # which may reveal something about free steps
            with open_file(self._file, os.O_RDWR) as descriptor:
                os.ftruncate(descriptor, self._whole.end)
            self._size = self._whole.end
        for path in [*self._charge_files]:
            self.append(self._charge_files[path])
            del self._charge_files[path]
            path.unlink()

    def append(self, record: Record) -> None:
        """Appends a record; if this fails, the file has the records from before."""
        before, text = self._whole, _encode(record)
        checksum = _checksum(text, before.checksum)
        line = text + b', "checksum": "' + checksum + b'"}'
        line = b"\n" + line if before.end else line
        end = before.end + len(line)
        with (
            files_required("steps must be in the ledger before they are released"),
            open_file(self._file, os.O_RDWR | os.O_CREAT) as descriptor,
        ):
            self._check_unchanged(descriptor)
            try:
                os.ftruncate(descriptor, before.end)
                _write(descriptor, line, before.end)
                if before.end == 0:
                    sync(self._file.parent)
                # The newline marks a whole line, so it comes after `fsync`.
                write_at(descriptor, b"\n", end)
                self._whole = _Whole([*before.records, record], checksum, end)
                self._size = end + 1
            except BaseException:  # of a signal too, at any of these lines
                os.ftruncate(descriptor, before.end)
                self._whole, self._size = before, before.end
                raise

    def _check_unchanged(self, descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        if size != self._size:
            _validate.fail(
                "only the run that holds the lock may write its ledger. Start the run "
                "again.",
                file=str(self._file),
                expected_bytes=self._size,
                bytes=size,
                error=RuntimeError,
            )


def _charge_files(directory: pathlib.Path) -> dict[pathlib.Path, Record]:
    found = {}
    for name in fnmatch.filter(names_in(directory), _CHARGE_FILES):
        path = directory / name
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():  # a pipe would never end
                found[path] = _decode(path.read_bytes(), str(path))
    return found


def write_charge_file(directory: pathlib.Path, record: Record) -> None:
    """Charges steps without the lock, in a file that the next `Ledger` counts."""
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
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    fields = {
        "format": _FORMAT,
        **dataclasses.asdict(record),
        "segment": segment_as_json(record.segment),
        "time": record.time or now,
    }
    return json.dumps(fields, allow_nan=False)[:-1].encode()


def _decode(text: bytes, place: str) -> Record:
    try:
        fields: dict[str, Any] = json.loads(text)
        written_by = fields.pop("format")
    except _NO_RECORD:
        _damaged(place)
    if written_by != _FORMAT:
        _validate.fail(
            f"a ledger must have format {_FORMAT}. Read it with the version of dpmp "
            "that wrote it.",
            line=place,
        )
    try:
        segment = segment_from_json(fields.pop("segment"))
        return Record(segment=segment, **fields)
    except _NO_RECORD:
        _damaged(place)


def _parse(content: bytes, file: str) -> _Whole:
    """An incomplete record at the end, with no newline after it, was never written."""
    records, checksum, end = [], b"", 0
    while line := _LINE.match(content, end):
        if line[2] != _checksum(line[1], checksum):
            break
        checksum, end = line[2], line.end()
        records.append(_decode(line[1] + b"}", f"{file}, line {len(records) + 1}"))
    rest = content[end:].removeprefix(b"\n") if end else content
    if b"\n" in rest:
        _damaged(f"{file}, line {len(records) + 1}")
    return _Whole(records, checksum, end)


def _damaged(place: str) -> NoReturn:
    _validate.fail(
        "every record of a ledger must be as it was written. Restore the file from a "
        "copy: it is the only account of these steps.",
        damaged=place,
    )


def _checksum(text: bytes, previous: bytes) -> bytes:
    return hashlib.blake2b(previous + text, digest_size=16).hexdigest().encode()
