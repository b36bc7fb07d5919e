"""What did the benchmarks measure? Writes benchmarks/README.md from results/*.jsonl.

    python -m benchmarks.report

Of lines that answer the same question, the last one counts. The page "Benchmarks" of
the guides includes this file. A test compares it with the lines, so run this command
whenever lines were added. Figures that are written by hand are in `figures.py`.
"""

import pathlib

from benchmarks import tables

PAGE = pathlib.Path(__file__).with_name("README.md")

_BEGINNING = """# Benchmarks

Every table is made from the lines in `benchmarks/results/`, which name the device and
the versions. `python -m benchmarks.report` makes this page. Install what the benchmarks
need with `pip install '.[bench]'`. Ratios compare contenders that ran in turn in one
process.
"""


def as_markdown() -> str:
    """The whole page."""
    return "\n".join([_BEGINNING, *tables.sections()])


def main() -> None:
    """Writes the page."""
    PAGE.write_text(as_markdown())


if __name__ == "__main__":
    main()
