"""Draws the sizes of gradient entries above the ranges of dtypes."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from dpmp._pictures import new_figure
from dpmp.tools.precision_report._comparison import Comparison

_DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_FLOAT32, _CANDIDATE = "#4c72b0", "#dd8452"
_NORMAL, _SUBNORMAL = "#8c8c8c", "#d0d0d0"


def plot(comparison: Comparison, policy: str) -> Any:
    """Draws the gradient under the policy, and that in float32."""
    figure = new_figure(figsize=(8, 5.5), layout="constrained")
    ratios = {"height_ratios": (3, 1.4)}
    sizes, ranges = figure.subplots(2, 1, sharex=True, gridspec_kw=ratios)
    _draw_sizes(sizes, comparison, policy)
    _draw_ranges(ranges)
    for axes in (sizes, ranges):
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    # All entries but a few tiny ones, and the range of float16.
    edges = [float(k) for k, _ in comparison.float32_exponents] or [0.0]
    ranges.set_xlim(max(min(edges[0], -26.0), -60.0), max(edges[-1], 16.0) + 2)
    ranges.set_xlabel("size of an entry, log2 |g|")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def _draw_sizes(axes: Any, comparison: Comparison, policy: str) -> None:
    """Draws a histogram of the sizes of entries for each of the two gradients."""
    total = comparison.total.num_entries
    style = {"color": _FLOAT32, "fill": True, "alpha": 0.45}
    label = f"{policy}, loss scale {comparison.loss_scale:g}"
    for exponents, name, options in (
        (comparison.float32_exponents, "float32", style),
        (comparison.exponents, label, {"color": _CANDIDATE}),
    ):
        counts = dict(exponents)
        bins = range(min(counts, default=0), max(counts, default=0) + 1)
        heights = [100 * counts.get(k, 0) / total for k in bins]
        zeros = f"({1 - sum(counts.values()) / total:.1%} zero)"
        edges = [float(k) for k in (*bins, bins.stop)]
        axes.stairs(heights, edges, label=f"{name} {zeros}", linewidth=1.8, **options)
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
