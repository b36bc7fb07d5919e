"""Reads the file of a ledger, and appends to it so that the disk has every record."""

import contextlib
import os
import pathlib

from dpmp import _validate
from dpmp.runs._records import Parsed, Record, encode, parse

_NAME = "ledger.jsonl"


def read(directory: pathlib.Path) -> Parsed | None:
    """Reads the ledger of a directory; None if there is none. Changes nothing.

    Raises:
      ValueError: if the file is damaged.
    """
    file = directory / _NAME
    return parse(file.read_bytes(), file=str(file)) if file.exists() else None


def append(directory: pathlib.Path, known: Parsed | None, record: Record) -> Parsed:
    """Appends a record to the file whose content is `known`; the disk then has it.

    An incomplete record at the end of the file is removed.

    Returns:
      The new content of the file, without its records.

    Raises:
      OSError: if the record cannot be written. The file stays readable.
      RuntimeError: if somebody else has changed the file.
    """
    known = known or Parsed([], b"", 0, 0)
    line, checksum = encode(record, known.checksum)
    file = directory / _NAME
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _check_unchanged(descriptor, known, file)
            end = _write(descriptor, line, known)
            if known.end == 0:
                sync_directory(directory)
            end += _write_newline(descriptor, end)
        finally:
            os.close(descriptor)
    except OSError as error:
        _validate.fail(
            "steps must be recorded in the ledger before they begin",
            file=str(file),
            reason=error.strerror or str(error),
            fix="They have not begun. Make room or make the directory writable, and "
            "continue the run.",
            error=OSError,
        )
    return Parsed([], checksum, end, end)


def sync_directory(directory: pathlib.Path) -> None:
    """Waits until the disk has the names of the files in a directory."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_unchanged(descriptor: int, known: Parsed, file: pathlib.Path) -> None:
    size = os.fstat(descriptor).st_size
    _validate.require(
        size == known.size,
        "only the run that holds the lock may write its ledger",
        file=str(file),
        expected_bytes=known.size,
        bytes=size,
        fix="Open the ledger again, within runs.locked.",
        error=RuntimeError,
    )


def _write(descriptor: int, line: bytes, known: Parsed) -> int:
    """Writes a line in the place of everything after `known.end`; returns its end."""
    os.ftruncate(descriptor, known.end)
    if known.end and os.pread(descriptor, 1, known.end - 1) != b"\n":
        line = b"\n" + line
    written = 0
    while written < len(line):  # a full disk may take a part
        written += os.pwrite(descriptor, line[written:], known.end + written)
    os.fsync(descriptor)
    return known.end + len(line)


def _write_newline(descriptor: int, end: int) -> int:
    """Marks the line as complete, if possible: it counts also without a newline."""
    with contextlib.suppress(OSError):
        return os.pwrite(descriptor, b"\n", end)
    return 0
