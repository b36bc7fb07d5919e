"""Removes what functions knew when they failed, which a report of an error may show."""

import contextlib
import traceback
from collections.abc import Iterator


def clear_frames(error: BaseException | None) -> None:
    """Clears the variables of all functions that an error has ended.

    Tools that report errors show variables: batches, gradients, keys. The lines of the
    traceback stay, and the variables of the caller, whose function goes on.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        clear_frames(error.__cause__)
        error = error.__context__


@contextlib.contextmanager
def cleared_frames() -> Iterator[None]:
    """Clears the variables of functions that fail within the block."""
    try:
        yield
    except BaseException as error:
        clear_frames(error)
        raise
