"""Loads the batches of the next steps in the background, while the device computes."""

import collections
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Batch = TypeVar("Batch")


@contextlib.contextmanager
def prefetched(
    draw: Callable[[int], Batch], steps: range, *, depth: int
) -> Iterator[Iterator[Batch]]:
    """Gives an iterator over `draw(step)` for all steps, in order.

    One thread draws up to `depth` batches ahead, one after the other. An exception of
    `draw` is raised when the iterator comes to its step. The thread has ended when the
    context ends, also after an exception; the batch that is being drawn at that time is
    finished first. A depth of 0 draws every batch when it is asked for, without a
    thread.

    >>> with prefetched(lambda step: step**2, range(4), depth=2) as batches:
    ...     print(list(batches))
    [0, 1, 4, 9]
    """
    if depth == 0:
        yield map(draw, steps)
        return
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dpmp-prefetch")
    try:
        yield _in_order(thread, draw, steps, depth)
    finally:
        thread.shutdown(wait=True, cancel_futures=True)


def _in_order(
    thread: ThreadPoolExecutor, draw: Callable[[int], Batch], steps: range, depth: int
) -> Iterator[Batch]:
    waiting: collections.deque[Future[Batch]] = collections.deque()
    for step in steps:
        waiting.append(thread.submit(draw, step))
        # While the oldest of these is in use, the others are drawn.
        if len(waiting) > depth:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
