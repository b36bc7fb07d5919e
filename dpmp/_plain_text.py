"""Plain text for reports: aligned tables and wrapped paragraphs."""

import textwrap
from collections.abc import Sequence

_WIDTH = 86


def table(rows: Sequence[Sequence[str]], align: str, indent: str = "") -> str:
    """Aligns the columns of a table; `align` has "<" or ">" for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            f"{cell:{side}{width}}"
            for cell, side, width in zip(row, align, widths, strict=False)
        )
        for row in rows
    ]
    return "\n".join(indent + line.rstrip() for line in lines)


def paragraph(text: str, bullet: str = "") -> str:
    """Wraps the first line of a text, and indents it by the width of a bullet."""
    first, *rest = text.split("\n")
    indent = " " * len(bullet)
    wrapped = textwrap.fill(bullet + first, _WIDTH, subsequent_indent=indent)
    return "\n".join([wrapped, *rest])
