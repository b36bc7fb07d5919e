"""Clears the variables of failed functions, which a report of an error may show."""

import contextlib
import traceback
from collections.abc import Iterator


def clear_frames(error: BaseException) -> None:
    """Clears the variables of all functions that an error has ended.

    Tools that report errors show variables: batches, gradients, keys. The lines of the
    traceback stay. So do the variables of the caller, which is still running.
    """
    errors = [error]
    for x in errors:
        traceback.clear_frames(x.__traceback__)
        more = [x.__cause__, x.__context__]
        more += x.exceptions if isinstance(x, BaseExceptionGroup) else []
        for y in more:  # an error may be its own cause, or equal to another error
            if y is not None and all(y is not z for z in errors):
                errors.append(y)


@contextlib.contextmanager
def cleared_frames() -> Iterator[None]:
    """Clears the variables of functions that fail within the block."""
    try:
        yield
    except BaseException as error:
        clear_frames(error)
        raise
