"""Matplotlib figures. Matplotlib is imported only when a figure is drawn."""

import pathlib
from collections.abc import Callable
from typing import Any

from dpmp import _validate


def new_figure(**options: Any) -> Any:
    """Makes an empty matplotlib figure; `options` are the arguments of its class."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        _validate.fail(
            "plots need matplotlib",
            matplotlib="not installed",
            fix="pip install matplotlib.",
            error=ModuleNotFoundError,
        )
    return Figure(**options)


def save(draw: Callable[[], Any], output: pathlib.Path) -> None:
    """Writes the figure that `draw` makes into a file, for a command."""
    try:
        figure = draw()
    except ModuleNotFoundError as error:  # the user can mend that
        raise _validate.RefusedError(str(error)) from None
    try:
        figure.savefig(output, dpi=120, format=output.suffix.removeprefix("."))
    except (OSError, ValueError) as error:
        _validate.fail(
            "the picture must be written to a file of a kind that matplotlib knows. "
            "Pass --output FILE.png, in a directory that can be written.",
            output=str(output),
            reason=str(error),
        )
