"""The file of a run's metrics: a line of JSON for each recorded step.

It has noisy values, numbers that the user computed from public data, and times. Lines
are in the order of their steps, and each step has one line at most.
"""

import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from dpmp.runs._files import files_required, open_file, read_if_any, write_at

Line: TypeAlias = dict[str, Any]

_NAME = "metrics.jsonl"


class MetricsFile:
    """Appends lines to the file, which is made if there is none."""

    def __init__(self, directory: pathlib.Path, lines: Sequence[Line], step: int):
        """Opens the file to go on after `step` steps; `lines` has the newest metrics.

        Lines of later steps are removed, because these steps are made again. An
        incomplete line at the end is removed too.
        """
        self._path = directory / _NAME
        known = [x for x in _lines(self._path) if x[0]["step"] <= step]
        # The running time of all processes that worked on the run so far.
        self.seconds = max((x.get("seconds") or 0.0 for x, _ in known), default=0.0)
        self._end = known[-1][1] if known else 0
        last = known[-1][0]["step"] if known else 0
        self.append([x for x in lines if x["step"] > last])

    def append(self, lines: Sequence[Line]) -> None:
        """Appends lines."""
        text = b"".join(json.dumps(x, allow_nan=False).encode() + b"\n" for x in lines)
        with (
            files_required("the metrics of a run must be written to its directory"),
            open_file(self._path, os.O_WRONLY | os.O_CREAT) as descriptor,
        ):
            os.ftruncate(descriptor, self._end)
            write_at(descriptor, text, self._end)
        self._end += len(text)


def read(directory: pathlib.Path) -> list[Line]:
    """The lines of a directory; none if there is no file."""
    return [line for line, _ in _lines(directory / _NAME)]


def _lines(path: pathlib.Path) -> Iterator[tuple[Line, int]]:
    """Yields each whole line of a file with the position of its end."""
    end = 0
    for text in read_if_any(path).splitlines(keepends=True):
        end += len(text)
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):  # no privacy claim depends on a line
            continue
        is_line = isinstance(line, dict) and isinstance(line.get("step"), int)
        is_line = is_line and isinstance(line.get("seconds", 0), int | float | None)
        if is_line and text.endswith(b"\n"):
            yield line, end
