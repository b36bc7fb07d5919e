"""Matplotlib figures. Matplotlib is imported only when a figure is drawn."""

import pathlib
from typing import Any

from dpmp import _validate


def new_figure(**options: Any) -> Any:
    """Makes an empty matplotlib figure; `options` are the arguments of its class.

    Raises:
      ModuleNotFoundError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        _validate.fail(
            "plots need matplotlib",
            matplotlib="not installed",
            fix="pip install 'dpmp[plot]'.",
            error=ModuleNotFoundError,
        )
    return Figure(**options)


def save(figure: Any, output: pathlib.Path) -> None:
    """Writes a figure into a file of the format that its name ends with.

    Raises:
      ValueError: if the file cannot be written, or if its format is unknown.
    """
    try:
        figure.savefig(output, dpi=120, format=output.suffix.removeprefix("."))
    except (OSError, ValueError) as error:
        _validate.fail(
            "the picture must be written to a file of a kind that matplotlib knows. "
            "Pass --output FILE.png, in a directory that can be written.",
            output=str(output),
            reason=str(error),
        )
