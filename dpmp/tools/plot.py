"""The command `plot` of `python -m dpmp`: draws the metrics of a run over its steps."""

import argparse
import pathlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dpmp import _validate, runs
from dpmp._pictures import new_figure, save

# Colours of Okabe and Ito, which people with any colour vision can tell apart.
_BLUE, _ORANGE, _GREEN = "#0072b2", "#d55e00", "#009e73"
_KINDS = {"noisy": _BLUE, "public": _ORANGE}
_SCALE = "loss_scale"
_LABELS = {
    "clipped": "clipped,\nfraction of examples",
    "overflowed": "gradient not finite,\nfraction of examples",
    "clip_norm": "clip norm",
    _SCALE: "loss scale",
    "steps_per_second": "speed, steps/s",
}
_NUM_MEANS = 50


def add_plot_command(commands: Any) -> None:
    """Adds the command to the subparsers of `argparse`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plot",
        help="Draws metrics, epsilon and loss scale of a run over its steps.",
        description="Draws the metrics that a run has written into its directory. The "
        "run may be going on.",
        epilog="python -m dpmp plot runs/first --output first.png",
    )
    add, text = parser.add_argument, "default: plot.png in the directory"
    add("directory", type=pathlib.Path, metavar="DIR", help="of a run")
    add("--output", type=pathlib.Path, metavar="FILE", help=text)
    parser.set_defaults(command=_plot)


def _plot(args: argparse.Namespace) -> int:
    output = args.output or args.directory / "plot.png"
    save(lambda: draw(args.directory), output)
    sys.stdout.write(f"{output}\n")
    return 0


def draw(directory: pathlib.Path) -> Any:
    """Draws a panel for each metric, and returns the matplotlib figure."""
    lines = runs.read_metrics(directory)
    if not lines:
        _validate.fail(
            "the directory must have metrics of a run. Pass a directory that "
            "fit(checkpoint_dir=) was given.",
            directory=str(directory),
        )
    curves = _curves(lines)
    names = list(dict.fromkeys(map(_panel, curves)))
    figure, panels = _grid(names, lines[-1]["step"])
    for name, points in curves.items():
        kind = name.partition("/")[0]
        _draw_curve(panels[_panel(name)], kind, points, len(lines) // _NUM_MEANS)
    _add_legend(figure, panels.values())
    return figure


def _curves(lines: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Steps and values, (2, number of points), of each metric that has any."""
    names = {name for line in lines for name in line} - {"step", "seconds"}
    points = {
        name: [(x["step"], x[name]) for x in lines if x.get(name) is not None]
        for name in sorted(names, key=_order)
    }
    return {name: np.transpose(x) for name, x in points.items() if x}


def _panel(name: str) -> str:
    """The name of a panel, which noisy and public curves of a metric share."""
    kind, _, short = name.partition("/")
    return short or kind


def _order(name: str) -> tuple[bool, bool, str, str]:
    """The loss first, then other metrics, and then the loss scale and the speed."""
    kind, panel = name.partition("/")[0], _panel(name)
    return kind not in _KINDS, panel != "loss", panel, kind


def _grid(names: Sequence[str], last: int) -> tuple[Any, dict[str, Any]]:
    """A figure, and its axes in two columns; the lowest axes label the steps."""
    columns = min(len(names), 2)
    rows = -(-len(names) // columns)
    size = 4.8 * columns, 2.3 * rows + 0.3
    figure = new_figure(figsize=size, layout="constrained")
    axes = [*figure.subplots(rows, columns, squeeze=False, sharex=True).flat]
    for unused in axes[len(names) :]:
        unused.remove()
    panels = dict(zip(names, axes, strict=False))
    figure.supxlabel("step", fontsize="medium")
    for place in [*panels.values()][-columns:]:
        place.tick_params(labelbottom=True)
    for name, place in panels.items():
        place.set_ylabel(_LABELS.get(name, name))
        place.set_xlim(0, last * 1.02)
        place.xaxis.get_major_locator().set_params(integer=True)
        place.grid(alpha=0.3)
        place.spines[["top", "right"]].set_visible(False)
        place.set_axisbelow(True)
        if name == _SCALE:
            place.set_yscale("log", base=2)
    return figure, panels


def _draw_curve(axes: Any, kind: str, points: np.ndarray, width: int) -> None:
    """Draws a curve; many points are pale, with a running mean over `width` points."""
    color, num_points = _KINDS.get(kind, _GREEN), points.shape[1]
    style: dict[str, Any] = {"color": color, "linewidth": 1.5, "label": kind}
    if kind == _SCALE:
        axes.step(*points, where="post", **style)
    elif kind == "public" or width < 2 or num_points < width:
        marker = "o" if num_points < _NUM_MEANS else ""
        axes.plot(*points, marker=marker, markersize=3, **style)
    else:
        axes.plot(*points, **style | {"alpha": 0.3, "linewidth": 0.6})
        means = [np.convolve(x, np.ones(width) / width, "valid") for x in points]
        style["label"] += f", mean of {width} points"
        axes.plot(*means, **style)


def _add_legend(figure: Any, panels: Iterable[Any]) -> None:
    """Explains noisy and public curves above all panels, if there is a choice."""
    lines = {line.get_label(): line for axes in panels for line in axes.lines}
    lines = {name: x for name, x in lines.items() if name.startswith(tuple(_KINDS))}
    if len(lines) > 1:
        options = {"loc": "outside upper center", "ncols": len(lines)}
        figure.legend(lines.values(), lines, frameon=False, **options)
