"""A precision report in words and tables."""

import itertools
import linecache
import math
import os
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from dpmp.tools import _plain_text
from dpmp.tools.precision_report._comparison import Comparison, GradientComparison
from dpmp.tools.precision_report._findings import NOTES, Finding

# The gradients of a model that computes in bfloat16 where it may are closer than this.
_CLOSE = 0.99
_NOTICEABLE_LOSS = 0.01
_NUM_WORST = 3
_AUTOCAST_HELPS = {
    "running sum",
    "sum",
    "gradient sum",
    "exponential",
    "normalisation",
    "wide product",
}


def render(
    name: str,
    policy: str,
    findings: Sequence[Finding],
    given: Comparison | None,
    best: Comparison | None,
) -> str:
    """Writes the report; `given` and `best` are comparisons at two loss scales."""
    parts, advice = [f"Precision of {name}, {policy}"], []
    if given is not None and best is not None:
        parts += _comparison(given, best)
        advice += _about_the_scale(given, best)
    advice += _about_findings(findings, best)
    steps = (_item(i, text) for i, text in enumerate(advice, 1))
    parts.append("What to change\n" + ("\n".join(steps) or "  Nothing."))
    parts += _about_products([x for x in findings if x.kind in NOTES])
    return "\n\n".join(parts)


def _item(number: int, text: str) -> str:
    """A numbered paragraph, and the lines that follow it as they are."""
    first, *rest = text.split("\n")
    return "\n".join([_plain_text.paragraph(first, f"{number}. "), *rest])


def _table(rows: Sequence[Sequence[str]], right: Sequence[int]) -> str:
    return textwrap.indent(_plain_text.table(rows, right), "  ")


def _short_sources(findings: Iterable[Finding]) -> dict[str, str]:
    """Sources without the folders that all of them share."""
    sources = list(dict.fromkeys(x.source for x in findings))
    folders = [os.path.dirname(x) for x in sources if os.path.isabs(x)]
    shared = os.path.commonpath(folders) if folders else ""
    return {x: os.path.relpath(x, shared) if os.path.isabs(x) else x for x in sources}


def _comparison(given: Comparison, best: Comparison) -> Iterator[str]:
    shown = [given] if best.loss_scale == given.loss_scale else [given, best]
    rows = [
        (name, *(cell(x, x.total) for x in shown)) for name, cell in _COMPARED.items()
    ]
    yield (
        "Next to float32, on the data given (exact and without noise: for public or "
        "synthetic\ndata only)\n" + _table(rows, right=(1, 2))
    )
    header = ("furthest from float32", "entries", "cosine", "norm ratio")
    worst = [
        (_path(x), f"{x.num_entries:,}", _number(x.cosine), _number(x.norm_ratio))
        for x in given.parameters[:_NUM_WORST]
    ]
    yield _table([header, *worst], right=(1, 2, 3))


def _path(x: GradientComparison) -> str:
    return x.path or "(itself)"


def _number(x: float) -> str:
    return f"{x:.5f}" if math.isfinite(x) else "not finite"


def _share(x: float) -> str:
    return f"{x:.2%}" if x == 0 or x >= 0.0001 else "< 0.01%"


def _power(scale: float) -> str:
    """A power of two as one writes it in Python."""
    return f"2.0**{round(math.log2(scale))}" if scale != 1 else "1"


# The rows of the table: what each cell shows of a comparison and its whole gradient.
_COMPARED = {
    "at loss scale": lambda x, _: _power(x.loss_scale),
    "loss": lambda x, _: f"{x.loss:.6g}",
    "loss in float32": lambda x, _: f"{x.float32_loss:.6g}",
    "relative difference": lambda x, _: f"{x.relative_difference:.1e}",
    "gradient: cosine": lambda _, x: _number(x.cosine),
    "gradient: norm ratio": lambda _, x: _number(x.norm_ratio),
    "gradient: not finite": lambda _, x: _share(x.not_finite),
    "float32 gradient, scaled and rounded: zero": lambda _, x: _share(x.rounded.zero),
    "... subnormal": lambda _, x: _share(x.rounded.subnormal),
    "... infinite": lambda _, x: _share(x.rounded.overflow),
}


def _about_the_scale(given: Comparison, best: Comparison) -> Iterator[str]:
    """Whether the loss should have another scale."""
    if best.total.not_finite:
        yield (
            "The gradient is not finite, whatever the loss scale: a value of the loss "
            "itself overflows. Use bfloat16, or float32 where it does."
        )
    elif given.total.not_finite:
        yield f"Overflow: use loss_scale={_power(best.loss_scale)}."
    elif given.total.rounded.lost > best.total.rounded.lost + _NOTICEABLE_LOSS:
        before, after = (_share(x.total.rounded.lost) for x in (given, best))
        yield (
            f"Underflow. Use loss_scale={_power(best.loss_scale)}, or "
            f"loss_scaling.by_loss(): {before} of the gradient's entries become zero "
            f"or subnormal at {_power(given.loss_scale)}, and {after} with it."
        )


def _about_findings(
    findings: Sequence[Finding], best: Comparison | None
) -> Iterator[str]:
    """What to do about lines, most important first."""
    kinds, names = {x.kind for x in findings}, _short_sources(findings)
    if "wide product" in kinds and "product" not in kinds:
        yield (
            "No product is in 16 bits. The policy only rounds arguments, which become "
            "float32 again on the first of the lines below."
        )
    changing = [x for x in findings if x.kind not in NOTES]
    for kind, group in itertools.groupby(changing, key=lambda x: x.kind):
        group = list(group)
        yield "\n".join(
            [f"{kind.capitalize()}. {group[0].advice}", *_lines(group, names)]
        )
    if kinds & _AUTOCAST_HELPS:
        yield (
            "Or write the function in float32 and let dpmp.autocast(fun) round what "
            "may be rounded."
        )
    elif best is not None and not best.total.cosine >= _CLOSE and not changing:
        paths = ", ".join(map(_path, best.parameters[:_NUM_WORST]))
        yield (
            f"No line stands out, but the gradient is not that of float32. Try "
            f"float32_paths with the parameters that are furthest from it: {paths}."
        )


def _lines(group: Sequence[Finding], names: dict[str, str]) -> Iterator[str]:
    """The lines of the source, and what happens on each of them."""
    for x in group:
        file, _, line = x.source.rpartition(":")
        code = linecache.getline(file, int(line)).strip()
        yield f"     {names[x.source]}  {_shortened(code, 60)}".rstrip()
        details = [
            f"{_shortened(x.primitive, 40)} in {x.dtype}",
            f"{x.count} times" if x.count > 1 else "",
            f"{x.length:,} terms" if x.length is not None else "",
            f"an error of up to {x.bound:.0%}" if x.bound is not None else "",
            "in the gradient" if x.in_gradient else "",
        ]
        yield f"       {', '.join(filter(None, details))}"


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3].rstrip() + "..."


def _about_products(products: Sequence[Finding]) -> Iterator[str]:
    """How many operations are as they should be."""
    if products:
        count = sum(x.count for x in products)
        longest = max(x.length or 1 for x in products)
        yield _plain_text.paragraph(
            f"Products with 16-bit results, as there should be: {count}, of up to "
            f"{longest:,} terms. XLA usually adds in float32 within these, and rounds "
            "the result."
        )
