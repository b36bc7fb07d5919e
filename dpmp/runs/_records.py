"""The records of a ledger, and the lines that they are written as.

A line is a JSON object that ends with a checksum of itself and of the checksum before.
So a line that was changed, left out or moved is noticed. This is against accidents:
anyone who may write the file can also compute new checksums.
"""

import dataclasses
import hashlib
import json
import re
from typing import Any, NamedTuple

import dp_accounting

from dpmp import _validate
from dpmp.mechanism import StepCost

_FORMAT = 1
_LINE = re.compile(rb'(\{[^\n]*?), "checksum": "([0-9a-f]{32})"\}')
_WHAT_TO_DO = "Restore the file from a copy: it is the only account of these steps."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """States that steps of a run are about to begin, or that they have not begun.

    Attributes:
      event: "begin"; or "not begun" for the last of the steps that the run's record
        before this one was about to begin.
      time: the time, in UTC (ISO 8601).
      dpmp: the version of dpmp.
      jax: the version of jax.
      key: the fingerprint of the key of the noise.
      data: the tag of the data.
      start: the first of the steps, counted from 0.
      stop: the step after the last of them.
      delta: the delta that the run was planned for, or None.
      cost: what one step costs in privacy.
    """

    event: str
    time: str
    dpmp: str
    jax: str
    key: str
    data: str
    start: int
    stop: int
    delta: float | None
    cost: StepCost


class Parsed(NamedTuple):
    """What a ledger's file contains.

    Attributes:
      records: all whole records.
      checksum: that of the last record.
      end: where the last record ends, with the newline after it if there is one.
      size: the size of the file, which is larger if it ends with an incomplete record.
    """

    records: list[Record]
    checksum: bytes
    end: int
    size: int


def encode(record: Record, previous: bytes) -> tuple[bytes, bytes]:
    """Returns the line of a record, without a newline, and its checksum."""
    cost = dataclasses.asdict(record.cost)
    cost["neighboring_relation"] = record.cost.neighboring_relation.name
    fields = {"format": _FORMAT, **dataclasses.asdict(record), "cost": cost}
    # Python writes floats so that reading them gives the same floats.
    text = json.dumps(fields, allow_nan=False)[:-1].encode()
    checksum = _checksum(text, previous)
    return text + b', "checksum": "' + checksum + b'"}', checksum


def parse(content: bytes, *, file: str) -> Parsed:
    """Reads the lines of a ledger.

    The last record may be incomplete, because the machine stopped while it was written.
    It has no newline then: a newline is written only after the disk has the record. So
    its steps never began.

    Raises:
      ValueError: for a line that is damaged, or written by another version of dpmp.
    """
    records, checksum, end = [], b"", 0
    while line := _LINE.match(content, end):
        if line[2] != _checksum(line[1], checksum):
            break
        checksum = line[2]
        records.append(_decode(line[1] + b"}", f"{file}, line {len(records) + 1}"))
        has_newline = content[line.end() : line.end() + 1] == b"\n"
        end = line.end() + has_newline
    _validate.require(
        b"\n" not in content[end:],
        "every line of a ledger must be as it was written",
        damaged=f"{file}, line {len(records) + 1}",
        fix=_WHAT_TO_DO,
    )
    return Parsed(records, checksum, end, len(content))


def _checksum(text: bytes, previous: bytes) -> bytes:
    return hashlib.blake2b(previous + text, digest_size=16).hexdigest().encode()


def _decode(text: bytes, place: str) -> Record:
    fields: dict[str, Any] = json.loads(text)
    _validate.require(
        fields.pop("format", None) == _FORMAT,
        f"a ledger must have format {_FORMAT}",
        line=place,
        fix="Read it with the version of dpmp that wrote it.",
    )
    try:
        cost = dict(fields.pop("cost"))
        relation = cost.pop("neighboring_relation")
        relation = dp_accounting.NeighboringRelation[relation]
        return Record(cost=StepCost(neighboring_relation=relation, **cost), **fields)
    except (KeyError, TypeError, ValueError):
        _validate.fail(
            f"a record must have the fields of format {_FORMAT}",
            line=place,
            fix=_WHAT_TO_DO,
        )
