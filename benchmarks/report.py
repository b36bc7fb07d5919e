"""What did the benchmarks measure? Writes benchmarks/README.md from results/*.jsonl.

    python -m benchmarks.report

The sections of the page are in tables.toml:

    title, benchmark    the heading, and the name of the benchmark
    text                with fields of the first line in braces, or `WORDS`
    parts               texts, and tables of the lines of the benchmark

and a table has

    keys       of lines that answer the same question, the last one counts: these fields
               say what the question is
    wanted     what a line has to have
    pivot      the arguments of `markdown.pivot`, whose rows there are instead
    rows       the name of a function of lines in `ROWS`, which gives other rows
    columns    see `markdown.table_of`
    heading    of a table for each device; without it, there is one for all

The page "Benchmarks" of the guides includes this file. The tables between markers in
docs/past_one_machine.md, "plan" in tables.toml, are made too. A test compares all of
them with the lines, so run this command whenever lines were added. Figures that are
written by hand are in `figures.py`.
"""

import collections
import pathlib
import tomllib
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks import needs
from benchmarks.markdown import Line, pivot, read, table_of

PAGE = pathlib.Path(__file__).with_name("README.md")
PLAN = PAGE.parents[1] / "docs" / "past_one_machine.md"
_SECTIONS = PAGE.with_name("tables.toml")

_BEGINNING = """# Results of the benchmarks

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
    used = {k: f(lines) for k, f in WORDS.items() if f"{{{k}" in text}
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
    if "pivot" in part:
        return [*pivot(lines, **part["pivot"])]
    return [*ROWS[part["rows"]](lines)] if "rows" in part else lines


def plan() -> str:
    """The page about runs past one machine, with new tables."""
    text = PLAN.read_text()
    made = {"needs": needs.table_of_needs()}
    for part in tomllib.loads(_SECTIONS.read_text())["plan"]:
        lines = read("scaling", *part["keys"].split(), **part.get("wanted", {}))
        (made[part["name"]],) = _tables(part, lines)
    for name, table in made.items():
        before, begin, rest = text.partition(f"<!-- table: {name} -->\n")
        _, end, after = rest.partition("<!-- end -->\n")
        text = f"{before}{begin}\n{table}\n\n{end}{after}"
    return text


_PROVED = ("dpmp book_keeping bounded", "dpmp per_example exact")
_DEFAULT_PEER = "jax_privacy, at once"


def _steps(lines: list[Line]) -> Iterable[Line]:
    """Steps with their times over that of others in the same framework."""
    for x in lines:
        for name in x["milliseconds"]:
            is_torch = name.startswith(("torch", "Opacus"))
            prefix, ratios = "torch, " if is_torch else "", x["time_over"]
            over = {k: ratios.get(prefix + k, {}).get(name) for k in ratios}
            yield {**x, "name": name, "over": over}


def _fastest(lines: list[Line]) -> Iterable[Line]:
    """The fastest step of dpmp that is proved, of each line."""
    for x in lines:
        times = {k: t for k, t in x["milliseconds"].items() if k.startswith(_PROVED)}
        name = min(times, key=times.__getitem__)
        memory, compiled = x["growth_megabytes"], x["compile_seconds"]
        peer = memory.get(_DEFAULT_PEER)
        yield {
            **x,
            "name": name,
            "step": name.removeprefix("dpmp "),
            "memory": memory[name] / peer if name in memory and peer else None,
            "compile": compiled[name] / compiled["plain"],
        }


def _checks(lines: list[Line]) -> Iterable[Line]:
    for x in lines:
        limits = [
            f"{words} {r[field]:.3g}"
            for words, field in (("at least", "at_least"), ("at most", "at_most"))
            for r in x["results"]
            if r[field]
        ]
        values = {r["subject"]: r["value"] for r in x["results"]}
        yield {**x, "allowed": limits[0] if limits else "", "values": values}


def _virtual(lines: list[Line]) -> Iterable[Line]:
    return (needs.checked(x) for x in lines if x["devices"] > 1 and not x.get("lora"))


def _h100s(lines: list[Line]) -> Iterable[Line]:
    return (needs.together(x) for x in lines if x["compiled_for"].startswith("h100"))


ROWS: dict[str, Callable[[list[Line]], Iterable[Line]]] = {
    "virtual": _virtual,
    "h100s": _h100s,
    "steps": _steps,
    "fastest": _fastest,
    "checks": _checks,
}


def _absences(lines: list[Line]) -> str:
    """What was not measured side by side, in words."""
    pairs = {
        f"{x['task']}: {name} ({reason})"
        for x in lines
        for name, reason in {**x["absent"], **x["refused"]}.items()
    }
    return " Not measured: " + "; ".join(sorted(pairs)) + "." if pairs else ""


def _num_seeds(lines: list[Line]) -> str:
    numbers = sorted({len(x["accuracy"]) for x in lines})
    return " to ".join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))


WORDS: dict[str, Callable[[list[Line]], object]] = {
    "absences": _absences,
    "seeds": _num_seeds,
    "last": lambda lines: lines[-1],
}


if __name__ == "__main__":
    PAGE.write_text(as_markdown())
    PLAN.write_text(plan())
