"""A picture of how large gradient entries are, and of what dtypes can hold."""

import math
from typing import Any

import jax.numpy as jnp

from dpmp import _validate
from dpmp.tools.precision_report._comparison import Comparison, Exponents

_DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_FLOAT32, _CANDIDATE, _SHIFTED = "#4c72b0", "#dd8452", "#55a868"
_NORMAL, _SUBNORMAL = "#8c8c8c", "#d0d0d0"


def plot(given: Comparison, best: Comparison, policy: str) -> Any:
    """A matplotlib figure: sizes of entries above, the ranges of dtypes below.

    Args:
      given: at the loss scale that is used.
      best: at the one that is suggested.
      policy: its name.

    Raises:
      ModuleNotFoundError: without matplotlib.
    """
    figure = _new_figure()
    sizes, ranges = figure.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": (3, 1.4)}
    )
    _draw_sizes(sizes, given, best, policy)
    _draw_ranges(ranges)
    _mark_float16(sizes)
    for axes in (sizes, ranges):
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    ranges.set_xlim(*_limits(given, best))
    ranges.set_xlabel("size of an entry, log2 |g|")
    handles = [x for axes in (sizes, ranges) for x in _handles(axes)]
    figure.legend(handles=handles, loc="outside upper center", ncols=2, frameon=False)
    return figure


def _new_figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        _validate.fail(
            "plots need matplotlib",
            matplotlib="not installed",
            fix="pip install 'dpmp[plot]'.",
            error=ModuleNotFoundError,
        )
    return Figure(figsize=(8, 5.5), layout="constrained")


def _handles(axes: Any) -> list[Any]:
    return axes.get_legend_handles_labels()[0]


def _draw_sizes(axes: Any, given: Comparison, best: Comparison, policy: str) -> None:
    """Histograms, and where the suggested loss scale moves them to."""
    total = given.total.num_entries
    wide = _outline(given.float32_exponents, total)
    axes.stairs(
        *wide,
        fill=True,
        color=_FLOAT32,
        alpha=0.45,
        label=f"float32 ({_zeros(given.float32_exponents, total)})",
    )
    axes.stairs(
        *_outline(given.exponents, total),
        color=_CANDIDATE,
        linewidth=1.8,
        label=f"{policy}, loss scale {_power(given.loss_scale)} "
        f"({_zeros(given.exponents, total)})",
    )
    if best.loss_scale != 1:
        values, edges = wide
        shift = math.log2(best.loss_scale)
        axes.stairs(
            values,
            [edge + shift for edge in edges],
            color=_SHIFTED,
            linewidth=1.8,
            linestyle="--",
            label=f"float32, times the suggested scale {_power(best.loss_scale)}",
        )
    axes.set_ylabel("entries, %")
    axes.set_ylim(bottom=0)
    axes.set_title("Gradient entries, without noise: for public data only", fontsize=10)


def _mark_float16(axes: Any) -> None:
    """Where it is subnormal, and where it ends."""
    tiny, normal, top = _range("float16")
    axes.axvspan(tiny, normal, color=_SUBNORMAL, alpha=0.35, linewidth=0)
    for edge in (tiny, normal, top):
        axes.axvline(edge, color=_NORMAL, linewidth=0.8, linestyle=":")


def _range(name: str) -> tuple[float, ...]:
    """Of a dtype, the smallest number, the smallest normal one, the largest: log2."""
    info = jnp.finfo(name)
    ends = (info.smallest_subnormal, info.smallest_normal, info.max)
    return tuple(math.log2(float(x)) for x in ends)


def _draw_ranges(axes: Any) -> None:
    """A bar for each dtype, from its smallest number to its largest."""
    for row, name in enumerate(_DTYPES):
        tiny, normal, top = _range(name)
        labels = (
            ("normal numbers", "subnormal ones, of fewer bits")
            if row == 0
            else (None, None)
        )
        axes.barh(row, top - normal, left=normal, color=_NORMAL, label=labels[0])
        axes.barh(row, normal - tiny, left=tiny, color=_SUBNORMAL, label=labels[1])
    axes.set_yticks(range(len(_DTYPES)), _DTYPES)
    axes.invert_yaxis()


def _outline(exponents: Exponents, total: int) -> tuple[list[float], list[float]]:
    """Heights in percent, and edges, of a histogram without gaps."""
    counts = dict(exponents)
    first, last = min(counts, default=0), max(counts, default=0)
    bins = range(first, last + 1)
    heights = [100 * counts.get(k, 0) / total for k in bins]
    return heights, [float(k) for k in (*bins, last + 1)]


def _zeros(exponents: Exponents, total: int) -> str:
    share = 1 - sum(count for _, count in exponents) / total
    return f"{share:.1%} zero"


def _power(scale: float) -> str:
    return f"2^{round(math.log2(scale))}" if scale != 1 else "1"


def _limits(given: Comparison, best: Comparison) -> tuple[float, float]:
    """All of the data, but for a few entries that are tiny, and of float16."""
    edges = [float(x) for x, _ in given.float32_exponents] or [0.0]
    top = max(*edges, edges[-1] + math.log2(best.loss_scale), 16.0)
    return max(min(*edges, -26.0), -60.0), top + 2
