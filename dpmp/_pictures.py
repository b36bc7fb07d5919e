"""Figures of matplotlib, which is imported only where one is drawn."""

from typing import Any

from dpmp import _validate


def new_figure(**options: Any) -> Any:
    """Makes an empty figure of matplotlib; `options` are those of its class.

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
