"""Warnings that point at a line of the user, however deep in dpmp they are raised."""

import sys
import warnings

# Context managers and cached properties add frames of Python's own modules.
_SKIPPED = {"dpmp", "jax", "contextlib", "functools"}


def warn(message: str) -> None:
    """Warns at the innermost line of the stack that is in neither dpmp nor jax."""
    frame, level = sys._getframe(1), 2
    while frame is not None and _package(frame.f_globals) in _SKIPPED:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _package(module: dict[str, object]) -> str:
    return str(module.get("__name__")).split(".")[0]
