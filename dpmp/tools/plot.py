"""The command `plot` of `python -m dpmp`: draws the metrics of a run over its steps."""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dpmp import _validate, runs
from dpmp._pictures import new_figure

_EXAMPLE = "python -m dpmp plot runs/first --output first.png"

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
        epilog=_EXAMPLE,
    )
    path: dict[str, Any] = {"type": pathlib.Path}
    parser.add_argument("directory", metavar="DIR", help="of a run", **path)
    text = "default: plot.png in the directory"
    parser.add_argument("--output", metavar="FILE", help=text, **path)
    parser.set_defaults(command=_plot)


def _plot(args: argparse.Namespace) -> int:
    output = args.output or args.directory / "plot.png"
    try:
        figure = draw(args.directory)
    except ModuleNotFoundError as error:  # the user can mend that
        raise _validate.RefusedError(str(error)) from None
    try:
        figure.savefig(output, dpi=120, format=output.suffix.removeprefix("."))
    except (OSError, ValueError) as error:
        _validate.fail(
            "the picture must be written to a file of a kind that matplotlib knows",
            output=str(output),
            reason=str(error),
            fix="Pass --output FILE.png, in a directory that can be written.",
        )
    sys.stdout.write(f"{output}\n")
    return 0


class _Curve(NamedTuple):
    """Numbers at some steps; `kind` is "noisy", "public" or the name of the numbers."""

    kind: str
    steps: np.ndarray
    values: np.ndarray


def draw(directory: pathlib.Path) -> Any:
    """Draws a panel for each metric, and returns the matplotlib figure.

    Raises:
      ValueError: without metrics, or without matplotlib.
    """
    lines = runs.read_metrics(directory)
    _validate.require(
        bool(lines),
        "the directory must have metrics of a run",
        directory=str(directory),
        fix="Pass a directory that fit(checkpoint_dir=) was given.",
    )
    panels = _panels(lines)
    last = lines[-1]["step"]
    figure, axes = _grid(len(panels), last)
    for place, (name, curves) in zip(axes, panels.items(), strict=False):
        for curve in curves:
            _draw_curve(place, curve, len(lines) // _NUM_MEANS)
        place.set_ylabel(_LABELS.get(name, name))
        if name == _SCALE:
            place.set_yscale("log", base=2)
    _add_legend(figure, axes)
    return figure


def _panels(lines: Sequence[dict[str, Any]]) -> dict[str, list[_Curve]]:
    """The curves by the names of their panels, which noisy and public curves share."""
    names = dict.fromkeys(name for line in lines for name in line)
    for name in ("step", "seconds"):
        names.pop(name, None)
    panels: dict[str, list[_Curve]] = {}
    for name in sorted(names, key=_order):
        points = [(x["step"], x[name]) for x in lines if x.get(name) is not None]
        if points:
            kind, _, short = name.partition("/")
            steps, values = map(np.array, zip(*points, strict=True))
            panels.setdefault(short or kind, []).append(_Curve(kind, steps, values))
    return panels


def _order(name: str) -> tuple[bool, bool, str]:
    """The loss first, then other metrics, and then the loss scale and the speed."""
    kind, _, short = name.partition("/")
    return kind not in _KINDS, short != "loss", short or kind


def _grid(num_panels: int, last: int) -> tuple[Any, list[Any]]:
    """A figure, and its axes in two columns; the lowest axes label the steps."""
    columns = min(num_panels, 2)
    rows = -(-num_panels // columns)
    size = 4.8 * columns, 2.3 * rows + 0.3
    figure = new_figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True)
    axes = list(grid.flat)
    for unused in axes[num_panels:]:
        unused.remove()
    axes = axes[:num_panels]
    figure.supxlabel("step", fontsize="medium")
    for place in axes[-columns:]:
        place.tick_params(labelbottom=True)
    for place in axes:
        place.set_xlim(0, last * 1.02)
        place.xaxis.get_major_locator().set_params(integer=True)
        place.grid(alpha=0.3)
        place.spines[["top", "right"]].set_visible(False)
        place.set_axisbelow(True)
    return figure, axes


def _draw_curve(axes: Any, curve: _Curve, width: int) -> None:
    """Draws a curve; many points are pale, with a running mean over `width` points."""
    color = _KINDS.get(curve.kind, _GREEN)
    style: dict[str, Any] = {"color": color, "linewidth": 1.5, "label": curve.kind}
    if curve.kind == _SCALE:
        axes.step(curve.steps, curve.values, where="post", **style)
    elif curve.kind == "public" or width < 2 or len(curve.steps) < width:
        marker = "o" if len(curve.steps) < _NUM_MEANS else ""
        axes.plot(curve.steps, curve.values, marker=marker, markersize=3, **style)
    else:
        pale = {"alpha": 0.3, "linewidth": 0.6}
        axes.plot(curve.steps, curve.values, **style | pale)
        mean = np.ones(width) / width
        means = [np.convolve(x, mean, "valid") for x in (curve.steps, curve.values)]
        style["label"] += f", mean of {width} points"
        axes.plot(*means, **style)


def _add_legend(figure: Any, axes: Sequence[Any]) -> None:
    """Explains noisy and public curves above all panels, if there is a choice."""
    handles = {}
    for place in axes:
        for handle, label in zip(*place.get_legend_handles_labels(), strict=True):
            if label.startswith(tuple(_KINDS)):
                handles[label] = handle
    if len(handles) > 1:
        place, columns = "outside upper center", len(handles)
        figure.legend(
            handles.values(), handles, loc=place, ncols=columns, frameon=False
        )
