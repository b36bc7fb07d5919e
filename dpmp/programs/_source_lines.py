"""Which line of the user's code asked for an equation."""

import os
import sysconfig
from typing import Any

import jax


def source_line(eqn: Any, caller: tuple[str, int] | None) -> tuple[str, int]:
    """File and line that asked for an equation.

    Args:
      eqn: any equation.
      caller: the user's line that called the program which it is in, if known:
        equations do not know of it.

    Returns:
      The user's line, or the caller's, or one in an installed package other than jax.
    """
    known = user_line(eqn) or caller or _line(eqn, _OUR_FILES + _JAX_FILES)
    return ("unknown", 0) if known is None else known


def user_line(eqn: Any) -> tuple[str, int] | None:
    """The innermost line that asked for an equation, and is in no installed package."""
    return _line(eqn, _OUR_FILES + _INSTALLED_FILES)


def _line(eqn: Any, skipped: tuple[str, ...]) -> tuple[str, int] | None:
    """Without what called this package, to have a function traced."""
    traceback = eqn.source_info.traceback
    frames = [] if traceback is None else list(traceback.frames)
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
