"""Lets one process at a time write the files of a run."""

import contextlib
import os
import pathlib
import socket
from collections.abc import Iterator

from dpmp import _validate
from dpmp.runs._files import sync_directory

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None

_NAME = "lock"


@contextlib.contextmanager
def locked(directory: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Holds the exclusive lock of a directory, which is made if there is none.

    The lock belongs to the process and vanishes with it, even if the process is killed.
    The file `lock` in the directory remains, and says who held the lock last.

    Args:
      directory: the directory of the runs.

    Raises:
      RuntimeError: if another process has the lock, or if the operating system has no
        such locks (Windows).
      OSError: if the directory cannot be written, or if its file system has no locks.
    """
    path = pathlib.Path(directory).absolute()  # a program may change its directory
    _make_directory(path)
    descriptor = os.open(path / _NAME, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with _holding(descriptor, path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _describe_this_process().encode(), 0)
            yield path
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _holding(descriptor: int, directory: pathlib.Path) -> Iterator[None]:
    if fcntl is None:
        _validate.fail(
            "the operating system must have the file locks of POSIX",
            system=os.name,
            fix="Use Linux or macOS. On Windows, use the Linux subsystem (WSL).",
            error=RuntimeError,
        )
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _validate.fail(
            "only one process at a time may write into the directory of a run",
            directory=str(directory),
            locked_by=os.pread(descriptor, 1000, 0).decode(errors="replace").strip(),
            fix="Wait until that process and those that it started have ended, or use "
            "another directory.",
            error=RuntimeError,
        )
    try:
        yield
    finally:
        # Closing would not do, as long as a forked process has the file open too.
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _describe_this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}\n"


def _make_directory(path: pathlib.Path) -> None:
    """Makes a directory and its parents, so that they survive a power failure."""
    if not path.is_dir():
        _make_directory(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
        sync_directory(path.parent)
