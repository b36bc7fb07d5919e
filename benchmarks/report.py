"""What did the benchmarks measure? Writes benchmarks/README.md from results/*.jsonl.

    python -m benchmarks.report

Of lines that answer the same question, the last one counts. The page "Benchmarks" of
the guides includes this file. The tables between markers in docs/past_one_machine.md
are made too. A test compares all of them with the lines, so run this command whenever
lines were added. Figures that are written by hand are in `figures.py`.
"""

import pathlib

from benchmarks import needs, tables

PAGE = pathlib.Path(__file__).with_name("README.md")
PLAN = PAGE.parents[1] / "docs" / "past_one_machine.md"

_BEGINNING = """# Benchmarks

Every table is made from the lines in `benchmarks/results/`, which name the device and
the versions. `python -m benchmarks.report` makes this page. Install what the benchmarks
need with `pip install '.[bench]'`. Ratios compare contenders that ran in turn in one
process.
"""


def as_markdown() -> str:
    """The whole page."""
    return "\n".join([_BEGINNING, *tables.sections()])


def plan() -> str:
    """The page about runs past one machine, with new tables."""
    text = PLAN.read_text()
    made = {"needs": needs.table_of_needs(), "checks": needs.table_of_checks()}
    for name, table in made.items():
        before, begin, rest = text.partition(f"<!-- table: {name} -->\n")
        _, end, after = rest.partition("<!-- end -->\n")
        text = f"{before}{begin}\n{table}\n\n{end}{after}"
    return text


def main() -> None:
    """Writes the pages."""
    PAGE.write_text(as_markdown())
    PLAN.write_text(plan())


if __name__ == "__main__":
    main()
