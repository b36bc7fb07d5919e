"""A precision report in words and tables."""

import itertools
import linecache
import math
import textwrap
from collections.abc import Sequence

from dpmp.tools.precision_report._comparison import Comparison
from dpmp.tools.precision_report._findings import NOTES, Finding, short_sources

# The gradients of a model that computes in bfloat16 where it may are closer than this.
_CLOSE = 0.99
_NOTICEABLE_LOSS = 0.01
_NUM_WORST = 3
_NUM_LINES = 5
_ROUNDED = (
    "running sum",
    "sum",
    "gradient sum",
    "exponential",
    "normalisation",
    "wide product",
)


def render(
    name: str,
    policy: str,
    findings: Sequence[Finding],
    given: Comparison | None,
    best: Comparison | None,
) -> str:
    """The report.

    Args:
      name: of the function.
      policy: its name.
      findings: those with most to gain first.
      given: at the loss scale that was asked for.
      best: at the one that is suggested.
    """
    parts = [f"Precision of {name}, {policy}", _findings_text(findings)]
    if given is not None and best is not None:
        parts.append(_comparison_text(policy, given, best))
    items = list(_to_change(findings, given, best))
    steps = [_paragraph(f"{i}. ", x) for i, x in enumerate(items, 1)]
    parts.append("What to change\n" + ("\n".join(steps) or "  Nothing."))
    return "\n\n".join(parts)


def _findings_text(findings: Sequence[Finding]) -> str:
    """Lines on which something is lost, and how many others are as they should be."""
    names = short_sources(findings)
    header = ("kind", "line", "operation", "dtype", "times", "terms", "error up to")
    rows = [_cells(x, names) for x in findings if x.kind not in NOTES]
    text = "Lines that lose more than they have to"
    text += "\n" + _table([header, *rows], right=(4, 5, 6)) if rows else ": none"
    return "\n\n".join(filter(None, [text, _note(findings)]))


def _cells(x: Finding, names: dict[str, str]) -> tuple[str, ...]:
    return (
        f"{x.kind} (gradient)"
        if x.in_gradient and x.kind != "gradient sum"
        else x.kind,
        names[x.source],
        _shortened(x.primitive, 30),
        x.dtype,
        str(x.count),
        "" if x.length is None else f"{x.length:,}",
        "" if x.bound is None else f"{x.bound:.0%}",
    )


def _note(findings: Sequence[Finding]) -> str:
    """What mixed precision is made of, in one sentence."""
    found = [x for x in findings if x.kind in NOTES]
    if not found:
        return ""
    count, longest = sum(x.count for x in found), max(x.length or 1 for x in found)
    return _paragraph(
        "",
        f"Besides, products with 16-bit results, as there should be: {count}, of up to "
        f"{longest:,} terms. XLA usually adds in float32 within these, and rounds the "
        f"result.",
    )


def _comparison_text(policy: str, given: Comparison, best: Comparison) -> str:
    columns = [given] if best.loss_scale == given.loss_scale else [given, best]
    rows = [_column(x) for x in columns]
    text = (
        "Next to float32, on the data given (exact and without noise: for public or "
        "synthetic\ndata only)\n"
    )
    names = [cells[0] for cells in rows[0]]
    cells = [(name, *(column[i][1] for column in rows)) for i, name in enumerate(names)]
    text += _table(cells, right=(1, 2))
    worst = [
        (
            x.path or "(itself)",
            f"{x.num_entries:,}",
            _number(x.cosine),
            _number(x.norm_ratio),
        )
        for x in given.parameters[:_NUM_WORST]
    ]
    header = ("furthest from float32", "entries", "cosine", "norm ratio")
    return text + "\n\n" + _table([header, *worst], right=(1, 2, 3))


def _column(x: Comparison) -> list[list[str]]:
    rounded = x.total.rounded
    return [
        ["at loss scale", power(x.loss_scale)],
        ["loss", f"{x.loss:.6g}"],
        ["loss in float32", f"{x.float32_loss:.6g}"],
        ["relative difference", f"{x.relative_difference:.1e}"],
        ["gradient: cosine", _number(x.total.cosine)],
        ["gradient: norm ratio", _number(x.total.norm_ratio)],
        ["gradient: not finite", _share(x.total.not_finite)],
        ["float32 gradient, scaled and rounded: zero", _share(rounded.zero)],
        ["... subnormal", _share(rounded.subnormal)],
        ["... infinite", _share(rounded.overflow)],
    ]


def _to_change(
    findings: Sequence[Finding], given: Comparison | None, best: Comparison | None
):
    """What to do, most important first."""
    kinds = {x.kind for x in findings}
    if given is not None and best is not None:
        yield from _about_the_scale(given, best)
    if "wide product" in kinds and "product" not in kinds:
        yield (
            "No product is in 16 bits: all that the policy does is to round arguments, "
            "which become float32 again on the first of the lines below."
        )
    names = short_sources(findings)
    changing = (x for x in findings if x.kind not in NOTES)
    for kind, group in itertools.groupby(changing, key=lambda x: x.kind):
        group = list(group)
        yield f"{kind.capitalize()}. {group[0].advice}" + _lines(group, names)
    if kinds & {*_ROUNDED}:
        yield (
            "Or write the function in float32 and let dpmp.autocast(fun) round what "
            "may be rounded."
        )
    elif best is not None and not best.total.cosine >= _CLOSE and not kinds - {*NOTES}:
        paths = ", ".join(x.path or "(itself)" for x in best.parameters[:_NUM_WORST])
        yield (
            f"No line stands out, but the gradient is not that of float32. Try "
            f"float32_paths with the parameters that are furthest from it: {paths}."
        )


def _about_the_scale(given: Comparison, best: Comparison):
    """Whether the loss should have another scale."""
    if best.total.not_finite:
        yield (
            "The gradient is not finite, whatever the loss scale: a value of the loss "
            "itself overflows. Use bfloat16, or float32 where it does."
        )
    elif given.total.not_finite:
        yield f"Overflow: use loss_scale={power(best.loss_scale)}."
    elif given.total.rounded.lost > best.total.rounded.lost + _NOTICEABLE_LOSS:
        yield (
            f"Underflow. Use loss_scale={power(best.loss_scale)}, or "
            f"loss_scaling.by_loss(): of the gradient's entries "
            f"{_share(given.total.rounded.lost)} become zero or subnormal at "
            f"{power(given.loss_scale)}, and {_share(best.total.rounded.lost)} with it."
        )


def _lines(group: Sequence[Finding], names: dict[str, str]) -> str:
    """The lines of the source, as they are written there."""
    lines = []
    for x in group[:_NUM_LINES]:
        file, _, line = x.source.rpartition(":")
        code = linecache.getline(file, int(line)).strip()
        what = x.primitive if x.kind in ("parameter", "input") else code
        lines.append(f"\n     {names[x.source]}  {_shortened(what, 60)}".rstrip())
    if len(group) > _NUM_LINES:
        lines.append(f"\n     and {len(group) - _NUM_LINES} more")
    return "".join(lines)


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3].rstrip() + "..."


def _paragraph(bullet: str, text: str) -> str:
    """Wraps what comes before the first line break."""
    first, *rest = text.split("\n")
    indent = " " * len(bullet)
    wrapped = textwrap.wrap(
        bullet + first, 86, subsequent_indent=indent, initial_indent=""
    )
    return "\n".join([*wrapped, *rest])


def _table(rows: Sequence[Sequence[str]], right: Sequence[int]) -> str:
    """Aligned columns, without those that are empty but for the header."""
    kept = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    widths = {i: max(len(row[i]) for row in rows) for i in kept}
    return "\n".join(
        "  "
        + "  ".join(
            f"{row[i]:{'>' if i in right else '<'}{widths[i]}}" for i in kept
        ).rstrip()
        for row in rows
    )


def _number(x: float) -> str:
    return f"{x:.5f}" if math.isfinite(x) else "not finite"


def _share(x: float) -> str:
    return f"{x:.2%}" if x == 0 or x >= 0.0001 else "< 0.01%"


def power(scale: float) -> str:
    """A power of two as one writes it in Python."""
    return f"2.0**{round(math.log2(scale))}" if scale != 1 else "1"
