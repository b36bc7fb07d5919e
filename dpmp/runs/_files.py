"""Files that survive a power failure. Links and pipes in their place are refused."""

import contextlib
import errno
import hashlib
import os
import pathlib
import stat
from collections.abc import Iterator
from typing import NoReturn

from dpmp import _validate


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


def refused(required: str, error: OSError) -> NoReturn:
    """Raises an OSError that says what was required and why it failed."""
    if error.strerror is None:  # it has such a message already
        raise error
    _validate.fail(
        required,
        file=str(error.filename or "of the run"),
        reason=error.strerror or str(error),
        fix="Make room, or make the directory writable. Then start the run again.",
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


def _folders(directory: pathlib.Path) -> Iterator[tuple[pathlib.Path, list[str]]]:
    """Yields a directory and all its folders, each with the names of its files."""

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
