"""Finds the line of the user's code that produced an equation or an error."""

import os
import sysconfig
import traceback
from typing import Any

import jax


def source_line(eqn: Any, caller: tuple[str, int] | None) -> tuple[str, int]:
    """Returns the file and line that produced an equation.

    This is the user's line. If there is none, it is `caller`, the line that called the
    equation's program, or a line in an installed package other than jax.
    """
    known = user_line(eqn) or caller or _line(eqn, _OUR_FILES + _JAX_FILES)
    return ("unknown", 0) if known is None else known


def user_line(eqn: Any) -> tuple[str, int] | None:
    """The innermost line that produced an equation and is in no installed package."""
    return _line(eqn, _OUR_FILES + _INSTALLED_FILES)


def error_line(error: BaseException) -> tuple[str, int]:
    """The innermost line of the user's code in a traceback, or of a library."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [(x.filename, x.lineno or 0) for x in reversed(frames)]
    for skipped in (_OUR_FILES + _INSTALLED_FILES, _OUR_FILES + _JAX_FILES):
        if found := [x for x in lines if not x[0].startswith(skipped)]:
            return found[0]
    return "unknown", 0


def _line(eqn: Any, skipped: tuple[str, ...]) -> tuple[str, int] | None:
    """Finds the innermost line; lines that called dpmp only had a function traced."""
    stack = eqn.source_info.traceback
    frames = [] if stack is None else list(stack.frames)
    ours = [i for i, x in enumerate(frames) if x.file_name.startswith(_OUR_FILES)]
    inner = frames[: ours[-1]] if ours else frames
    lines = ((x.file_name, x.line_num) for x in inner)
    return next((x for x in lines if not x[0].startswith(skipped)), None)


def _folders(*paths: str) -> tuple[str, ...]:
    return tuple(path.rstrip(os.sep) + os.sep for path in paths)


_OUR_FILES = _folders(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_JAX_FILES = _folders(os.path.dirname(jax.__file__))
_LIBRARIES = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
_INSTALLED_FILES = (*_JAX_FILES, *_folders(*_LIBRARIES), "<frozen")
