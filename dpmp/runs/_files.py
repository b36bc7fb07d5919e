"""The path of a run, its lock, and files that survive a power failure.

Files are for their owner alone.
"""

import contextlib
import errno
import hashlib
import os
import pathlib
import socket
import stat
import tempfile
from collections.abc import Iterator
from typing import Any, NoReturn

from dpmp import _validate

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None

CHECKPOINTS = "checkpoints"  # the folder of a run that has them


def checked_path(directory: Any) -> pathlib.Path:
    """The absolute path of a directory that exists or can be made."""
    is_path = isinstance(directory, str | os.PathLike)
    text = os.fsdecode(directory) if is_path else ""
    if (
        text == ""
        or text.encode(errors="ignore").decode() != text
        or "\0" in text
        or "://" in text
    ):
        _validate.fail(
            "checkpoint_dir must be the path of a directory on a local or mounted "
            'file system, which can lock files. Use "runs/1", for example. Copy '
            "finished checkpoints to a bucket.",
            checkpoint_dir=text if is_path else type(directory).__name__,
        )
    folder = tempfile.gettempdir()
    if set(folder) & set("*?[]\\"):
        _validate.fail(
            "the folder of temporary files must have a name without * ? [ ] and "
            "backslashes, for the links that checkpoints need. Set TMPDIR to another "
            "one.",
            folder=folder,
        )
    path = pathlib.Path(os.path.expanduser(text))
    path = path.absolute()  # a program may change its directory
    try:
        is_directory = stat.S_ISDIR(path.stat().st_mode)
        reason = None if is_directory else "a file of this name"
        if (path / CHECKPOINTS).is_file():
            reason = f"a file in it has the name {CHECKPOINTS}"
    except OSError as error:
        reason = None if isinstance(error, FileNotFoundError) else error.strerror
    if reason is not None:
        _validate.fail(
            "checkpoint_dir must be a directory, or a name for a new one. Use another "
            "one.",
            checkpoint_dir=text[:200],
            reason=reason,
        )
    return path


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
