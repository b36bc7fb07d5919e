"""Signals that stop a run: they wait for the step, so that its state is not lost."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class Signals:
    """A context in which Ctrl-C, and SIGTERM if wanted, raise an exception in order.

    SIGTERM, which schedulers of clusters send some seconds before they kill a process,
    raises SystemExit. Where the program has handlers of its own, they stay.

    Attributes:
      received: whether a signal has stopped the run. Signals do not depend on data.
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
        self.received = False
        self._is_deferred, self._waiting = False, list[int]()

    def __enter__(self) -> "Signals":
        for number in self._usual:
            signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._usual.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Lets a signal act at the end of the block; a second one acts at once.

        A step uses up the arrays of the state before it. An interruption between that
        and the assignment of the new state would lose both.
        """
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False
        while self._waiting:
            self._stop(self._waiting.pop())

    def _handle(self, number: int, frame: Any) -> None:
        if self._is_deferred and not self._waiting:
            self._waiting.append(number)
        else:
            self._stop(number)

    def _stop(self, number: int) -> None:
        self.received = True
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        # Shells report a process that a signal ended with the status 128 + its number.
        raise SystemExit(128 + number)
