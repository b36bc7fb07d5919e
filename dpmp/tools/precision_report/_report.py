"""A precision report, in words and tables."""

import linecache
import math
import pathlib
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dpmp import _validate
from dpmp.tools import _plain_text
from dpmp.tools.precision_report import _plot
from dpmp.tools.precision_report._comparison import Comparison, power_as_code
from dpmp.tools.precision_report._findings import ADVICE, CASTS, Finding

# A model that uses bfloat16 only where it may has gradients with a larger cosine.
_CLOSE = 0.99
_NOTICEABLE_LOSS = 0.01
_NUM_WORST = 3
_LENGTH_OF_MESSAGE = 300


@dataclass(frozen=True)
class PrecisionReport:
    """How a policy changes a loss. `print` shows the report as text.

    Attributes:
      name: the name of the function.
      policy: the name of the policy, or its compute dtype.
      findings: lines of the program, with most to gain first.
      comparison: the comparison with float32; None without data.
      suggested: the comparison at the loss scale with which the fewest entries of the
        gradient become zero or subnormal; None without data.
    """

    name: str
    policy: str
    findings: tuple[Finding, ...]
    comparison: Comparison | None = None
    suggested: Comparison | None = None

    def __str__(self) -> str:
        parts, advice = [f"Precision of {self.name}, {self.policy}"], []
        if self.comparison is not None and self.suggested is not None:
            parts += _tables(self.comparison, self.suggested)
            advice += _about_the_scale(self.comparison, self.suggested)
        advice += _about_findings(self.findings, self.suggested)
        items = [_plain_text.paragraph(x, f"{i}. ") for i, x in enumerate(advice, 1)]
        parts.append("\n".join(["What to change", *(items or ["  Nothing."])]))
        if products := [x for x in self.findings if x.kind == "product"]:
            parts.append(_about_products(products))
        return "\n\n".join(parts)

    def plot(self, path: Any = None) -> Any:
        """Draws the sizes of the gradient's entries beside the ranges of dtypes.

        The picture is for public or synthetic data only, since it has no noise.

        Args:
          path: a file to save the picture to, if any.

        Returns:
          A matplotlib figure.

        Raises:
          ModuleNotFoundError: without matplotlib (`pip install 'dpmp[plot]'`).
          ValueError: without data.
        """
        if self.comparison is None or self.suggested is None:
            _validate.fail(
                "there is nothing to plot without data",
                comparison=None,
                fix="Call precision_report with arrays, of public or synthetic data.",
            )
        figure = _plot.plot(self.comparison, self.suggested, self.policy)
        if path is not None:
            figure.savefig(path)
        return figure


def _tables(given: Comparison, best: Comparison) -> Iterator[str]:
    shown = [given] if best.loss_scale == given.loss_scale else [given, best]
    rows = [[name, *map(cell, shown)] for name, cell in _COMPARED.items()]
    yield (
        "Comparison with float32 on the given data. The numbers have no noise, so the "
        "data must\nbe public or synthetic.\n"
        + _plain_text.table(rows, "<>>", indent="  ")
    )
    header = ["furthest from float32", "entries", "cosine", "norm ratio"]
    worst = [
        [_path(x.path), f"{x.num_entries:,}", _number(x.cosine), _number(x.norm_ratio)]
        for x in given.parameters[:_NUM_WORST]
    ]
    yield _plain_text.table([header, *worst], "<>>>", indent="  ")


def _path(path: str) -> str:
    return path or "argument 0"


def _number(x: float) -> str:
    return f"{x:.5f}" if math.isfinite(x) else "not finite"


def _share(x: float) -> str:
    return f"{x:.2%}" if x == 0 or x >= 0.0001 else "< 0.01%"


# The rows of the first table: the name, and the cell for a comparison.
_COMPARED = {
    "loss scale": lambda x: power_as_code(x.loss_scale),
    "loss": lambda x: f"{x.loss:.6g}",
    "loss in float32": lambda x: f"{x.float32_loss:.6g}",
    "relative difference of the losses": lambda x: f"{x.relative_difference:.1e}",
    "gradient: cosine": lambda x: _number(x.total.cosine),
    "gradient: norm ratio": lambda x: _number(x.total.norm_ratio),
    "gradient: not finite": lambda x: _share(x.total.not_finite),
    "float32 gradient, rounded: zero": lambda x: _share(x.total.rounded.zero),
    "... subnormal": lambda x: _share(x.total.rounded.subnormal),
    "... infinite": lambda x: _share(x.total.rounded.overflow),
}


def _about_the_scale(given: Comparison, best: Comparison) -> Iterator[str]:
    """Whether the loss should have another scale."""
    if best.total.not_finite:
        yield (
            "The gradient is not finite at any loss scale, because a value within the "
            "loss overflows. Use bfloat16, or compute this value in float32."
        )
    elif given.total.not_finite:
        yield f"Overflow: use loss_scale={power_as_code(best.loss_scale)}."
    elif given.total.rounded.lost > best.total.rounded.lost + _NOTICEABLE_LOSS:
        before, after = (_share(x.total.rounded.lost) for x in (given, best))
        yield (
            f"Underflow: {before} of the gradient's entries become zero or subnormal, "
            f"but only {after} with loss_scale={power_as_code(best.loss_scale)}. Use "
            "this scale, or loss_scaling.by_loss()."
        )


def _about_findings(
    findings: Sequence[Finding], best: Comparison | None
) -> Iterator[str]:
    """What to do about lines, most important first."""
    kinds = {x.kind for x in findings}
    if "wide product" in kinds and "product" not in kinds:
        yield (
            "No product is in 16 bits. The policy only rounds arguments, and the first "
            "of the lines below widens them to float32 again."
        )
    for kind, advice in ADVICE.items():
        if advice and kind in kinds:
            lines = (_lines(x) for x in findings if x.kind == kind)
            yield "\n".join([f"{kind.capitalize()}. {advice}", *lines])
    if kinds.difference(CASTS, ["product"]):
        yield (
            "Or write the function in float32, and let dpmp.autocast(fun) choose what "
            "is rounded."
        )
    elif best is not None and kinds <= {"product"} and best.total.cosine < _CLOSE:
        paths = ", ".join(_path(x.path) for x in best.parameters[:_NUM_WORST])
        yield (
            "No line stands out, but the gradient differs from that of float32. Try "
            f"float32_paths with the parameters that are furthest from it: {paths}."
        )


def _lines(x: Finding) -> str:
    """A line of the source, and a line on what happens there."""
    file, _, line = x.source.rpartition(":")
    place = "/".join(pathlib.PurePath(file).parts[-2:])
    code = textwrap.shorten(linecache.getline(file, int(line)), 60)
    where = f"     {place}:{line}  {code}".rstrip()
    if x.kind == "clash":
        message = textwrap.shorten(x.primitive, _LENGTH_OF_MESSAGE)
        return "\n".join(
            [where, *(f"       {part}" for part in textwrap.wrap(message, 79))]
        )
    details = [
        f"{textwrap.shorten(_path(x.primitive), 40)} in {x.dtype}",
        f"{x.count} times" if x.count > 1 else "",
        f"{x.length:,} terms" if x.length is not None else "",
        f"an error of up to {x.bound:.0%}" if x.bound is not None else "",
        "in the gradient" if x.in_gradient else "",
    ]
    return where + f"\n       {', '.join(filter(None, details))}"


def _about_products(products: Sequence[Finding]) -> str:
    count = sum(x.count for x in products)
    longest = max(x.length or 1 for x in products)
    return _plain_text.paragraph(
        f"Products with 16-bit results: {count}, of up to {longest:,} terms. They need "
        "no change: XLA usually adds in float32 within a product, and only rounds the "
        "result."
    )
