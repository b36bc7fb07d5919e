"""Lets one process at a time write the files of a run."""

import contextlib
import os
import pathlib
import socket
from collections.abc import Iterator
from typing import NoReturn

from dpmp import _validate
from dpmp.runs._files import make_directory, open_file

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None


@contextlib.contextmanager
def locked(directory: pathlib.Path) -> Iterator[None]:
    """Holds the exclusive lock of a directory, which is made if there is none.

    The lock belongs to the process and vanishes with it, even if the process is killed.
    The file `lock` in the directory remains, and says who held the lock last.
    """
    if fcntl is None:
        _no_locks(directory, "the operating system has no POSIX locks")
    make_directory(directory)
    with open_file(directory / "lock", os.O_RDWR | os.O_CREAT) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
            _validate.fail(
                "only one run at a time may write into a directory",
                directory=str(directory),
                locked_by=owner,
                fix="Wait until that process and those that it started have ended, or "
                "use another directory.",
                error=RuntimeError,
            )
        except OSError as error:
            _no_locks(directory, error.strerror or str(error))
        process = os.getpid()
        try:
            os.ftruncate(descriptor, 0)
            who = f"process {process} on {socket.gethostname()}, {os.urandom(8).hex()}"
            os.pwrite(descriptor, f"{who}\n".encode(), 0)
            os.fsync(descriptor)
            yield
        finally:
            # Closing the file keeps the lock while a forked process has it open too.
            # And a forked process must not release the lock.
            if process == os.getpid():
                fcntl.flock(descriptor, fcntl.LOCK_UN)


def _no_locks(directory: pathlib.Path, reason: str) -> NoReturn:
    _validate.fail(
        "the directory of a run must be on a file system with POSIX locks (flock)",
        directory=str(directory),
        reason=reason,
        fix="Use a local disk, on Linux or macOS. On Windows, use the Linux subsystem "
        "(WSL).",
        error=RuntimeError,
    )
