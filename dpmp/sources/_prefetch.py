"""Loads the batches of the next steps in the background, while the device computes."""

import collections
import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

S = TypeVar("S")
T = TypeVar("T")

# A source that hangs must not keep an interrupted program from ending.
_SECONDS_TO_END = 5.0


@contextlib.contextmanager
def prefetched(
    draw: Callable[[S], T], tickets: Iterable[S], *, depth: int
) -> Iterator[Iterator[T]]:
    """Gives an iterator over `draw(ticket)` for all tickets, in order.

    One thread draws up to `depth` batches ahead, one after the other. An exception of
    `draw` is raised when the iterator comes to its ticket. A depth of 0 draws every
    batch when it is asked for, without a thread. The tickets are taken in the calling
    thread. The thread has ended when the context ends; after an exception, it is
    abandoned if the batch that is being drawn takes longer than five seconds.
    """
    if depth == 0:
        yield (_result(_attempt(draw, ticket)) for ticket in tickets)
        return
    jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # Not a ThreadPoolExecutor: Python waits for its threads when it exits.
    thread = threading.Thread(target=_work, args=(draw, jobs), daemon=True)
    thread.start()
    try:
        yield _in_order(jobs, tickets, depth)
    except BaseException:
        with contextlib.suppress(queue.Empty):
            while True:
                jobs.get_nowait()
        jobs.put(None)
        thread.join(_SECONDS_TO_END)
        raise
    jobs.put(None)
    thread.join()


def _work(draw: Callable[[S], T], jobs: queue.SimpleQueue[Any]) -> None:
    while (job := jobs.get()) is not None:
        ticket, result = job
        result.put(_attempt(draw, ticket))


def _attempt(
    draw: Callable[[S], T], ticket: S
) -> tuple[T | None, BaseException | None]:
    try:
        return draw(ticket), None
    except BaseException as error:
        return None, error


def _in_order(
    jobs: queue.SimpleQueue[Any], tickets: Iterable[S], depth: int
) -> Iterator[Any]:
    waiting: collections.deque[queue.SimpleQueue[Any]] = collections.deque()
    for ticket in tickets:
        waiting.append(queue.SimpleQueue())
        jobs.put((ticket, waiting[-1]))
        # While the oldest of these is in use, the others are drawn.
        if len(waiting) > depth:
            yield _result(waiting.popleft().get())
    while waiting:
        yield _result(waiting.popleft().get())


def _result(attempt: tuple[T | None, BaseException | None]) -> Any:
    batch, error = attempt
    if error is not None:
        # A report of the error may show the variables of frames, which are sensitive.
        raise error.with_traceback(None)
    return batch
