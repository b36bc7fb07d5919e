"""How a run stops: signals wait for the end of a step, and errors lose their variables.

So a step and its state are not lost, and a report of an error shows no secret.
"""

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

from dpmp._warnings import warn


class Signals:
    """A context in which Ctrl-C, and SIGTERM if wanted, stop a run in order.

    A signal waits until the run comes to a block that is `interruptible`. A second one
    acts at once. SIGTERM, which schedulers of clusters send some seconds before they
    kill a process, raises SystemExit. Signal handlers of the program itself are not
    replaced. The exceptions have an attribute `is_signal`.
    """

    def __init__(self, *, sigterm: bool):
        usual = {signal.SIGINT: signal.default_int_handler}
        usual |= {signal.SIGTERM: signal.SIG_DFL} if sigterm else {}
        is_main = threading.current_thread() is threading.main_thread()
        self._usual = {
            number: handler
            for number, handler in usual.items()
            if is_main and signal.getsignal(number) == handler
        }
        self._is_interruptible = self._is_over = False
        self._waiting: list[int] = []
        self._process = os.getpid()
        self._restore = contextlib.ExitStack()
        self._handled = sys.exception()  # the program may be handling an older error

    def __enter__(self) -> "Signals":
        try:
            for number, handler in self._usual.items():
                self._restore.callback(signal.signal, number, handler)
                signal.signal(number, self._handle)
        except BaseException:  # from a signal handler of the program itself
            self._restore.close()
            raise
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self._restore.close()
        if kind is None:
            self.act()

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Lets a signal act within the block, also a signal that came before it."""
        self.act()
        self._is_interruptible = True
        try:
            yield
        finally:
            self._is_interruptible = False

    def act(self) -> None:
        """Raises the exception of a signal that waits."""
        if self._waiting:
            raise _exception_of(self._waiting.pop())

    def have_raised(self, error: BaseException) -> bool:
        """Whether a signal raised this exception, while there was no other error."""
        is_alone = error.__context__ is None or error.__context__ is self._handled
        return getattr(error, "is_signal", False) and is_alone

    def ignore(self) -> None:
        """Lets no signal act any more, since the run ends anyway."""
        self._is_over = True
        self._waiting.clear()

    def _handle(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:  # a forked process ends as usual
            signal.signal(number, self._usual[signal.Signals(number)])
            os.kill(os.getpid(), number)
            return
        if self._is_over:
            return
        if self._is_interruptible or self._waiting:
            self._waiting.clear()
            raise _exception_of(number)
        self._waiting.append(number)


def _exception_of(number: int) -> BaseException:
    # Shells report a process that a signal ended with the status 128 + its number.
    is_interrupt = number == signal.SIGINT
    error = KeyboardInterrupt() if is_interrupt else SystemExit(128 + number)
    error.is_signal = True  # pyright: ignore[reportAttributeAccessIssue]
    return error


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


def add_note(error: BaseException, text: str) -> None:
    """Adds a note, unless the error refuses."""
    with contextlib.suppress(Exception):
        error.add_note(f"dpmp: {text}")


def warn_of_exit(error: BaseException) -> None:
    """Shows the notes of an exit, of which Python would show nothing."""
    if isinstance(error, SystemExit):
        notes = [x.removeprefix("dpmp: ") for x in getattr(error, "__notes__", [])]
        with contextlib.suppress(Warning):  # where warnings are errors
            warn(" ".join(notes or ["the run ended in its first step."]))
