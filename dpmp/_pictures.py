"""Matplotlib figures. Matplotlib is imported only when a figure is drawn."""

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
