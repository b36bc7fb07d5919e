"""Files for their owner alone that survive a power failure, and the lock of a run."""

import contextlib
import errno
import hashlib
import os
import pathlib
import socket
import stat
from collections.abc import Iterator
from typing import NoReturn

from dpmp import _validate

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None


@contextlib.contextmanager
def open_file(path: pathlib.Path, flags: int) -> Iterator[int]:
    """Opens a file for its owner alone; a link or a pipe in its place is refused."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not an ordinary file", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def write_at(descriptor: int, content: bytes, place: int) -> None:
    """Writes all of the content; a full disk may take a part at a time."""
    written = 0
    while written < len(content):
        written += os.pwrite(descriptor, content[written:], place + written)


def read_if_any(path: pathlib.Path) -> bytes:
    """The content of a file; empty if there is none."""
    return path.read_bytes() if path.is_file() else b""


@contextlib.contextmanager
def files_required(required: str) -> Iterator[None]:
    """Makes an OSError of the block say what was required and why it failed."""
    try:
        yield
    except OSError as error:
        if error.strerror is None:  # it has such a message already
            raise
        _validate.fail(
            required,
            fix="Make room, or make the directory writable. Then start the run again.",
            file=str(error.filename or "of the run"),
            reason=error.strerror,
            error=OSError,
        )


def make_directory(path: pathlib.Path) -> None:
    """Makes a directory and its parents, so that they survive a power failure."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
        sync(path.parent)


def sync(path: pathlib.Path) -> None:
    """Waits until the disk has a file, or the names of the files in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: pathlib.Path) -> None:
    """Waits until the disk has a directory with all its files and folders."""
    for folder, names in _folders(directory):
        for name in names:
            sync(folder / name)
        sync(folder)


def digest_of_tree(directory: pathlib.Path) -> str:
    """A hash of the names and the contents of all files in a directory."""
    total = hashlib.blake2b(digest_size=16)
    files = (folder / name for folder, names in _folders(directory) for name in names)
    # A file manager may leave files like .DS_Store.
    for path in sorted(x for x in files if x.is_file() and x.name[0] != "."):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "blake2b").digest()
        name = str(path.relative_to(directory)).encode()
        total.update(hashlib.blake2b(name).digest() + content)
    return total.hexdigest()


def _folders(directory: pathlib.Path) -> Iterator[tuple[pathlib.Path, list[str]]]:
    """Yields the folders of a tree, the inner ones first, with their files' names."""

    def fail(error: OSError) -> NoReturn:  # a folder that cannot be read is not empty
        raise error

    for folder, _, names in os.walk(directory, topdown=False, onerror=fail):
        yield pathlib.Path(folder), names


def names_in(directory: pathlib.Path) -> list[str]:
    """The names in a directory; none if there is no such directory."""
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []


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
                "only one run at a time may write into a directory. Wait until that "
                "process and those that it started have ended, or use another "
                "directory.",
                directory=str(directory),
                locked_by=owner,
                error=RuntimeError,
            )
        except OSError as error:
            _no_locks(directory, error.strerror or str(error))
        process = os.getpid()
        _locked.add(descriptor)
        try:
            os.ftruncate(descriptor, 0)
            who = f"process {process} on {socket.gethostname()}, {os.urandom(8).hex()}"
            os.pwrite(descriptor, f"{who}\n".encode(), 0)
            os.fsync(descriptor)
            yield
        finally:
            if process == os.getpid():  # a forked process must not release the lock
                _locked.discard(descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_UN)


# The descriptors of locks. A forked process that lives longer would keep them.
_locked: set[int] = set()


def _close_locks() -> None:
    """Opens something else in place of the locks, in a forked process."""
    null = os.open(os.devnull, os.O_RDONLY)
    for descriptor in _locked:
        os.dup2(null, descriptor, inheritable=False)
    _locked.clear()
    os.close(null)


if fcntl is not None:
    os.register_at_fork(after_in_child=_close_locks)


def _no_locks(directory: pathlib.Path, reason: str) -> NoReturn:
    _validate.fail(
        "the directory of a run must be on a file system with POSIX locks (flock). Use "
        "a local disk, on Linux or macOS. On Windows, use the Linux subsystem (WSL).",
        directory=str(directory),
        reason=reason,
        error=RuntimeError,
    )
