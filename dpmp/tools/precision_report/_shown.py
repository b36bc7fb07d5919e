"""A precision report, in words and tables."""

import linecache
import math
import pathlib
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dpmp import _plain_text
from dpmp.tools.precision_report._comparison import Comparison, GradientComparison
from dpmp.tools.precision_report._findings import ADVICE, Finding

# If bfloat16 is used only in operations that tolerate it, the cosine is larger.
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
      findings: lines of the program, the most important first.
      comparison: the comparison with float32; None without data.
    """

    name: str
    policy: str
    findings: tuple[Finding, ...]
    comparison: Comparison | None = None

    def __str__(self) -> str:
        parts, advice = [f"Precision of {self.name}, {self.policy}"], []
        if self.comparison is not None:
            parts += _tables(self.comparison)
            advice += _about_the_scale(self.comparison.total)
        advice += _about_findings(self.findings, self.comparison)
        items = [_plain_text.paragraph(x, f"{i}. ") for i, x in enumerate(advice, 1)]
        parts.append("\n".join(["What to change", *(items or ["  Nothing."])]))
        return "\n\n".join(parts)


def _tables(x: Comparison) -> Iterator[str]:
    total = x.total
    rows = {
        "loss scale": f"{x.loss_scale:g}",
        "loss": f"{x.loss:.6g}",
        "loss in float32": f"{x.float32_loss:.6g}",
        "relative difference of the losses": f"{x.relative_difference:.1e}",
        "gradient: cosine": _number(total.cosine),
        "gradient: norm ratio": _number(total.norm_ratio),
        "gradient: not finite": _share(total.not_finite),
        "float32 gradient, rounded: zero": _share(total.zero),
        "... subnormal": _share(total.subnormal),
        "... infinite": _share(total.overflow),
    }
    yield (
        "Comparison with float32 on the given data. The numbers have no noise, so the "
        "data must\nbe public or synthetic.\n"
        + _plain_text.table(list(rows.items()), "<>", indent="  ")
    )
    header = ["furthest from float32", "entries", "cosine", "norm ratio"]
    worst = [
        [_path(x.path), f"{x.num_entries:,}", _number(x.cosine), _number(x.norm_ratio)]
        for x in x.parameters[:_NUM_WORST]
    ]
    yield _plain_text.table([header, *worst], "<>>>", indent="  ")


def _path(path: str) -> str:
    return path or "argument 0"


def _number(x: float) -> str:
    return f"{x:.5f}" if math.isfinite(x) else "not finite"


def _share(x: float) -> str:
    return f"{x:.2%}" if x == 0 or x >= 0.0001 else "< 0.01%"


def _about_the_scale(total: GradientComparison) -> Iterator[str]:
    """Advice on the loss scale, if the gradient overflows or underflows."""
    if total.not_finite:
        yield (
            "Overflow: the gradient is not finite. Use a smaller loss scale, or "
            "bfloat16, or compute the value that overflows in float32."
        )
    elif total.lost > _NOTICEABLE_LOSS:
        yield (
            f"Underflow: {_share(total.lost)} of the gradient's entries become zero or "
            "subnormal. Use a larger loss scale, or loss_scaling.by_loss()."
        )


def _about_findings(
    findings: Sequence[Finding], comparison: Comparison | None
) -> Iterator[str]:
    """Advice on the findings, the most important first."""
    kinds = {x.kind for x in findings}
    for kind, advice in ADVICE.items():
        if kind in kinds:
            lines = (_lines(x) for x in findings if x.kind == kind)
            yield "\n".join([f"{kind.capitalize()}. {advice}", *lines])
    if kinds - {"widened"}:
        yield (
            "Or write the function in float32, and let dpmp.autocast(fun) choose what "
            "is rounded."
        )
    elif comparison and not kinds and comparison.total.cosine < _CLOSE:
        paths = ", ".join(_path(x.path) for x in comparison.parameters[:_NUM_WORST])
        yield (
            "No line stands out, but the gradient differs from that of float32. Try "
            f"float32_paths with the parameters that are furthest from it: {paths}. "
            "If that does not help, inputs are rounded too: scale or centre them, or "
            "use dpmp.autocast(fun). Or nearly equal numbers are subtracted: compute "
            "both in float32, a product by preferred_element_type=jnp.float32. "
            "dpmp.compare_policies tries which paths help."
        )


def _lines(x: Finding) -> str:
    """The source line of a finding, and a line that describes it."""
    file, _, line = x.source.rpartition(":")
    place = "/".join(pathlib.PurePath(file).parts[-2:])
    code = textwrap.shorten(linecache.getline(file, int(line)), 60)
    where = f"     {place}:{line}  {code}".rstrip()
    if x.kind == "clash":
        message = textwrap.shorten(x.primitive, _LENGTH_OF_MESSAGE)
        return f"{where}\n{textwrap.indent(textwrap.fill(message, 79), ' ' * 7)}"
    details = [
        f"{textwrap.shorten(_path(x.primitive), 40)} in {x.dtype}",
        f"{x.count} times" if x.count > 1 else "",
        f"{x.length:,} terms" if x.length is not None else "",
        f"an error of up to {x.bound:.0%}" if x.bound is not None else "",
        "in the gradient" if x.in_gradient else "",
    ]
    return where + f"\n       {', '.join(filter(None, details))}"
