"""The file of a run's metrics: a line of JSON for each recorded step.

It has noisy values, numbers that the user computed from public data, and times. Lines
are in the order of their steps, and each step has one line at most.
"""

import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from dpmp import _validate

Line: TypeAlias = dict[str, Any]

_NAME = "metrics.jsonl"


class MetricsFile:
    """Appends lines to the file, which is made if there is none."""

    def __init__(self, directory: pathlib.Path, step: int):
        """Opens the file to go on after `step` steps.

        Lines of later steps are removed, because these steps are made again. So is an
        incomplete line at the end.
        """
        self._path = path = directory / _NAME
        content = path.read_bytes() if path.exists() else b""
        kept = [x for x in _lines(content) if x[0]["step"] <= step]
        # The running time of all processes that worked on the run so far.
        self.seconds = kept[-1][0].get("seconds", 0.0) if kept else 0.0
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._file = os.fdopen(descriptor, "wb", buffering=0)
        self._file.truncate(kept[-1][1] if kept else 0)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends the values of a step. One that is not finite is written as null.

        Raises:
          OSError: if the line cannot be written.
        """
        finite = {name: _finite(x) for name, x in values.items()}
        line = json.dumps({"step": step, **finite}, allow_nan=False)
        try:
            self._file.write(line.encode() + b"\n")
        except OSError as error:
            _validate.fail(
                "the metrics of a run must be written to its directory",
                file=str(self._path),
                reason=error.strerror or str(error),
                fix="Make room, and run the same program again.",
                error=OSError,
            )

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read(directory: pathlib.Path) -> list[Line]:
    """The lines of a directory; none if there is no file.

    A line that is damaged is left out, since no privacy claim depends on it.
    """
    path = directory / _NAME
    return [x for x, _ in _lines(path.read_bytes())] if path.exists() else []


def _lines(content: bytes) -> Iterator[tuple[Line, int]]:
    """Yields each whole line, and the place where it ends."""
    end = 0
    for text in content.splitlines(keepends=True):
        end += len(text)
        try:
            line = json.loads(text)
        except ValueError:
            continue
        is_line = isinstance(line, dict) and isinstance(line.get("step"), int)
        if is_line and text.endswith(b"\n"):
            yield line, end


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None  # JSON has no infinity
