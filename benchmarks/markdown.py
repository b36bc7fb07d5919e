"""Result lines as tables of Markdown."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.harness import RESULTS, mean_and_error

Line = dict[str, Any]


def read(benchmark: str, *keys: str, **wanted: Any) -> list[Line]:
    """The last line for each combination of `keys`, of lines that have what is wanted.

    Lines are in the order in which their combinations were first measured. A line with
    a remark has no figures, and is left out.
    """
    last: dict[tuple[str, ...], Line] = {}
    for text in (RESULTS / f"{benchmark}.jsonl").read_text().splitlines():
        line = json.loads(text)
        is_wanted = all(line.get(name) == value for name, value in wanted.items())
        if is_wanted and "remark" not in line:
            line["processor"] = line["device"].partition(",")[0]
            last[tuple(repr(line.get(key)) for key in keys)] = line
    return list(last.values())


def pivot(lines: Iterable[Line], row: str, column: str, value: str) -> Iterable[Line]:
    """A row for each value of the field `row`, with the mean over seeds in each column.

    Lines have the value of one seed or a list of those of several.
    """
    rows: dict[Any, Line] = {}
    for x in lines:
        if value not in x:  # an older line
            continue
        values = x[value] if isinstance(x[value], list) else [x[value]]
        cells = rows.setdefault(x[row], {**x, "cells": {}})["cells"]
        cells.setdefault(column.format_map(x), []).extend(values)
    for x in rows.values():
        cells = {name: mean_with_error(values) for name, values in x["cells"].items()}
        yield {**x, "cells": cells}


def table_of(columns: str, rows: Sequence[Line]) -> str:
    """A table of these rows.

    Args:
      columns: "header = path | header = path", or a path alone if it is the header. A
        path such as "time_ratio/{name}/plain" leads to a value of a row. Behind " * "
        is what that is multiplied by, behind " or " what stands for None, and behind
        " : " its format. In quotes, there is a text with fields in braces.
        "{}, s = seconds/*" stands for a column for each name in the field.
      rows: with the fields of a result line, or others.
    """
    found: list[tuple[str, str]] = []
    for column in columns.split("|"):
        header, _, path = column.strip().partition(" = ")
        path, is_each, rest = (path or header).partition("/*")
        names = (
            dict.fromkeys(k for x in rows for k in _get(x, path)) if is_each else [""]
        )
        for name in names:
            full = f"{path}/{name}{rest}" if is_each else path
            found.append((header.replace("{}", name), full))
    cells = [[_get(x, path) for _, path in found] for x in rows]
    return table([header for header, _ in found], cells)


def _get(row: Line, path: str) -> Any:
    """What a path leads to; None if it is not there."""
    if path.startswith('"'):
        return path.strip('"').format_map(row)
    path, _, form = path.partition(" : ")
    path, _, default = path.partition(" or ")
    path, _, factor = path.partition(" * ")
    found: Any = row
    for name in path.format_map(row).split("/"):
        if isinstance(found, list):
            found = found[int(name)]
        else:
            found = found.get(name) if found else None
    if found is None:
        return default or None
    found = found * float(factor) if factor else found
    return format(found, form) if form else found


def mean_with_error(values: Sequence[float]) -> str:
    """The mean with its standard error, if there are several values."""
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return "{:.3f} ± {:.3f}".format(*mean_and_error(values))


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table with a row of names and rows of values."""
    cells = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(_cell, row)) + " |" for row in cells)


def _cell(x: Any) -> str:
    if x is None:
        return ""
    return f"{x:.3g}" if isinstance(x, float) else str(x)
