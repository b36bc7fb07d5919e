"""How much memory does the process take while a function runs?

The compiler's account leaves out what a program of PyTorch takes, and what jax keeps
beside a program. This asks Linux, which counts the pages in memory.
"""

import ctypes
import pathlib
from collections.abc import Callable
from typing import Any

_PROCESS = pathlib.Path("/proc/self")


def growth_in_bytes(call: Callable[[], Any]) -> int | None:
    """By how much the process grows at most while `call` runs; None if not on Linux."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # returns pages that are free
        (_PROCESS / "clear_refs").write_text("5")  # the peak begins at what is in use
        before = _status("VmRSS")
    except OSError:
        return None
    call()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = (_PROCESS / "status").read_text().splitlines()
    (line,) = (x for x in lines if x.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])
