"""Plain text for reports: aligned tables and wrapped paragraphs."""

import textwrap
from collections.abc import Sequence

_WIDTH = 86


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Aligns the columns of a table, and leaves out columns without any content.

    Args:
      rows: the cells of each row. The first row is the header.
      right: the indices of the columns that are aligned to the right.
    """
    shown = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    widths = [max(len(row[i]) for row in rows) for i in shown]
    align = [">" if i in right else "<" for i in shown]
    return "\n".join(
        "  ".join(
            f"{row[i]:{side}{width}}"
            for i, side, width in zip(shown, align, widths, strict=True)
        ).rstrip()
        for row in rows
    )


def paragraph(text: str, bullet: str = "") -> str:
    """Wraps a text, and indents all lines but the first by the width of the bullet."""
    indent = " " * len(bullet)
    return textwrap.fill(bullet + text, _WIDTH, subsequent_indent=indent)
