"""Draws the sizes of gradient entries above the ranges of dtypes."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from dpmp._pictures import new_figure
from dpmp.tools.precision_report._comparison import Comparison, Exponents, power_as_code

_DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_FLOAT32, _CANDIDATE, _SHIFTED = "#4c72b0", "#dd8452", "#55a868"
_NORMAL, _SUBNORMAL = "#8c8c8c", "#d0d0d0"


def plot(given: Comparison, best: Comparison, policy: str) -> Any:
    """Draws a gradient at the loss scale that is used, and at the one suggested."""
    figure = new_figure(figsize=(8, 5.5), layout="constrained")
    sizes, ranges = figure.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": (3, 1.4)}
    )
    _draw_sizes(sizes, given, best, policy)
    _draw_ranges(ranges)
    for axes in (sizes, ranges):
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    # All entries but a few tiny ones, and the range of float16.
    edges = [float(k) for k, _ in given.float32_exponents] or [0.0]
    top = max(edges[-1] + max(0.0, math.log2(best.loss_scale)), 16.0)
    ranges.set_xlim(max(min(edges[0], -26.0), -60.0), top + 2)
    ranges.set_xlabel("size of an entry, log2 |g|")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def _draw_sizes(axes: Any, given: Comparison, best: Comparison, policy: str) -> None:
    """Draws histograms, one of them moved to where the suggested scale puts it."""
    total = given.total.num_entries

    def draw(exponents: Exponents, label: str, shift: float = 0, **style: Any) -> None:
        counts = dict(exponents)
        bins = range(min(counts, default=0), max(counts, default=0) + 1)
        heights = [100 * counts.get(k, 0) / total for k in bins]
        edges = [float(k) + shift for k in (*bins, bins.stop)]
        axes.stairs(heights, edges, label=label, linewidth=1.8, **style)

    exact, scale = given.float32_exponents, power_as_code(given.loss_scale)
    zeros, policy_zeros = (
        f"({1 - sum(dict(x).values()) / total:.1%} zero)"
        for x in (exact, given.exponents)
    )
    draw(exact, f"float32 {zeros}", color=_FLOAT32, fill=True, alpha=0.45)
    label = f"{policy}, loss scale {scale} {policy_zeros}"
    draw(given.exponents, label, color=_CANDIDATE)
    if best.loss_scale != 1:
        label = f"float32, times the suggested scale {power_as_code(best.loss_scale)}"
        shift = math.log2(best.loss_scale)
        draw(exact, label, shift, color=_SHIFTED, linestyle="--")
    for edge in _range("float16"):
        axes.axvline(edge, color=_NORMAL, linewidth=0.8, linestyle=":")
    axes.set_ylabel("entries, %")
    axes.set_ylim(bottom=0)
    axes.set_title("Gradient entries, without noise: for public data only", fontsize=10)


def _draw_ranges(axes: Any) -> None:
    """Draws a bar for each dtype, from its smallest number to its largest."""
    tiny, normal, top = np.transpose([_range(name) for name in _DTYPES])
    axes.barh(_DTYPES, top - normal, left=normal, color=_NORMAL, label="normal numbers")
    label = "subnormal numbers, of fewer bits"
    axes.barh(_DTYPES, normal - tiny, left=tiny, color=_SUBNORMAL, label=label)
    axes.invert_yaxis()


def _range(name: str) -> tuple[float, ...]:
    """The smallest number of a dtype, its smallest normal one, its largest: log2."""
    info = jnp.finfo(name)
    ends = (info.smallest_subnormal, info.smallest_normal, info.max)
    return tuple(math.log2(float(x)) for x in ends)
