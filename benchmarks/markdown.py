"""Result lines as sections of Markdown with tables."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.results import RESULTS

Line = dict[str, Any]
Row = Sequence[Any]

# An arithmetic that earlier lines have measured, and that dpmp has no longer.
_RETIRED = "float32x2"


def read(benchmark: str, *keys: str, **wanted: Any) -> list[Line]:
    """The last line for each combination of `keys`, of lines that have what is wanted.

    Lines are in the order in which their combinations were first measured. A line with
    a remark need not have the keys.
    """
    last: dict[tuple[str, ...], Line] = {}
    for text in (RESULTS / f"{benchmark}.jsonl").read_text().splitlines():
        line = _without_retired(json.loads(text))
        if all(line.get(name) == value for name, value in wanted.items()):
            last[tuple(repr(line.get(key)) for key in keys)] = line
    return list(last.values())


def _without_retired(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: _without_retired(v) for k, v in x.items() if _RETIRED not in k}
    if isinstance(x, list):
        return [
            _without_retired(v)
            for v in x
            if not (isinstance(v, dict) and _RETIRED in str(v))
        ]
    return x


def by_device(lines: Iterable[Line]) -> dict[str, list[Line]]:
    """The lines of each device."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(line["device"], []).append(line)
    return groups


def has_lines(benchmark: str) -> bool:
    """Whether a benchmark has been run."""
    return (RESULTS / f"{benchmark}.jsonl").exists()


def section(
    title: str, text: str, command: str, lines: Sequence[Line], *tables: str
) -> str:
    """A section with a heading, a text, the command that measures, and tables."""
    measured = sorted(
        {(x["device"], x["versions"]["jax"], x["date"]) for x in lines}, reverse=True
    )
    where = "; ".join(f"{device}, jax {jax}, {day}" for device, jax, day in measured)
    parts = [f"## {title}", text, f"`python -m benchmarks.{command}` ({where})"]
    return "\n\n".join([*parts, *tables]) + "\n"


def table(header: Sequence[str], rows: Iterable[Row]) -> str:
    """A table with a row of names and rows of values."""
    cells = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(_cell, row)) + " |" for row in cells)


def _cell(x: Any) -> str:
    if x is None:
        return ""
    return f"{x:.3g}" if isinstance(x, float) else str(x)
