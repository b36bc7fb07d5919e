"""What did the benchmarks measure? Writes benchmarks/README.md from results/*.jsonl.

    python -m benchmarks.report

The sections of the page are in tables.toml:

    title, benchmark    the heading, and the name of the benchmark
    text                with fields of the first line in braces, or `tables.WORDS`
    parts               texts, and tables of the lines of the benchmark

and a table has

    keys       of lines that answer the same question, the last one counts: these fields
               say what the question is
    wanted     what a line has to have
    each       a field that has names: a row for each of them, instead of these lines
    pivot      the arguments of `markdown.pivot`, whose rows there are instead
    rows       the name of a function of lines in `tables.ROWS`, which gives other rows
    columns    see `markdown.table_of`
    heading    of a table for each device; without it, there is one for all

The page "Benchmarks" of the guides includes this file. The tables between markers in
docs/past_one_machine.md are made too. A test compares all of them with the lines, so
run this command whenever lines were added. Figures that are written by hand are in
`figures.py`.
"""

import collections
import pathlib
import tomllib
from typing import Any

from benchmarks import needs, tables
from benchmarks.markdown import Line, each, pivot, read, table_of

PAGE = pathlib.Path(__file__).with_name("README.md")
PLAN = PAGE.parents[1] / "docs" / "past_one_machine.md"
_SECTIONS = PAGE.with_name("tables.toml")

_BEGINNING = """# Benchmarks

Every table is made from the lines in `benchmarks/results/`, which name the device and
the versions. `python -m benchmarks.report` makes this page. Install what the benchmarks
need with `pip install '.[bench]'`. Ratios compare contenders that ran in turn in one
process.
"""


def as_markdown() -> str:
    """The whole page."""
    sections = tomllib.loads(_SECTIONS.read_text())["sections"]
    return "\n".join([_BEGINNING, *map(_section, sections)])


def _section(section: dict[str, Any]) -> str:
    """The heading, the text, the command that measures, and the parts."""
    benchmark, lines, parts = section["benchmark"], [], []
    for part in section["parts"]:
        if "text" in part:
            parts.append(_in_one_line(part["text"]))
            continue
        found = read(benchmark, *part["keys"].split(), **part.get("wanted", {}))
        lines += found
        parts += _tables(part, found)
    text = _in_one_line(section["text"])
    used = {k: f(lines) for k, f in tables.WORDS.items() if f"{{{k}" in text}
    text = text.format_map({**lines[0], **used})
    measured = {(x["device"], x["versions"]["jax"], x["date"]) for x in lines}
    where = "; ".join(
        f"{device}, jax {jax}, {day}"
        for device, jax, day in sorted(measured, reverse=True)
    )
    command = f"`python -m benchmarks.{benchmark}` ({where})"
    return "\n\n".join([f"## {section['title']}", text, command, *parts]) + "\n"


def _in_one_line(text: str) -> str:
    return " ".join(text.split())


def _tables(part: dict[str, Any], lines: list[Line]) -> list[str]:
    """The table, or one for each device."""
    if "heading" not in part:
        return [table_of(part["columns"], _rows(part, lines))]
    by_device = collections.defaultdict(list)
    for line in lines:
        by_device[line["device"]].append(line)
    return [
        f"### {part['heading'].format(device=device)}\n\n"
        + table_of(part["columns"], _rows(part, some))
        for device, some in by_device.items()
    ]


def _rows(part: dict[str, Any], lines: list[Line]) -> list[Line]:
    if "each" in part:
        return [*each(lines, part["each"])]
    if "pivot" in part:
        return [*pivot(lines, **part["pivot"])]
    return [*tables.ROWS[part["rows"]](lines)] if "rows" in part else lines


def plan() -> str:
    """The page about runs past one machine, with new tables."""
    text = PLAN.read_text()
    made = {"needs": needs.table_of_needs(), "checks": needs.table_of_checks()}
    for name, table in made.items():
        before, begin, rest = text.partition(f"<!-- table: {name} -->\n")
        _, end, after = rest.partition("<!-- end -->\n")
        text = f"{before}{begin}\n{table}\n\n{end}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(as_markdown())
    PLAN.write_text(plan())
