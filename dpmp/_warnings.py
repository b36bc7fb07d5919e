"""Warnings that point at a line of the user, however deep in dpmp they are raised."""

import contextlib
import functools
import os
import sys
import warnings

import jax


def warn(message: str) -> None:
    """Warns at the innermost line of the stack that is in neither dpmp nor jax."""
    frame, level = sys._getframe(1), 2
    while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


_FOLDERS = (os.path.dirname(os.path.abspath(__file__)), os.path.dirname(jax.__file__))
# Python has a frame of its own for context managers and cached properties.
_SKIPPED = (
    *(folder + os.sep for folder in _FOLDERS),
    contextlib.__file__,
    functools.__file__,
)
