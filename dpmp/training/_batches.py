"""The batches of a run: drawn with a ticket, loaded in the background, and padded."""

import collections
import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np

from dpmp._typing import PyTree
from dpmp.mechanism import DPSGD
from dpmp.training._placed import load_shards
from dpmp.training._source import Load
from dpmp.training._tickets import Ticket

T = TypeVar("T")

# A source that hangs must not keep an interrupted program from ending.
_SECONDS_TO_END = 5.0


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """A batch that was drawn for one step, whose random bits it holds; sensitive.

    Attributes:
      examples: arrays with a leading axis of `mechanism.padded_batch_size`.
      is_padding_example: (padded_batch_size,) bool.
      ticket: the keys of the step.
    """

    examples: PyTree = dataclasses.field(repr=False)
    is_padding_example: Any = dataclasses.field(repr=False)
    ticket: Ticket = dataclasses.field(repr=False)


def draw_batch(mechanism: DPSGD, load: Load, sharding: Any, ticket: Ticket) -> Batch:
    """Draws and loads the batch of a ticket."""
    (words,) = ticket.take("batch")
    indices = mechanism.sampling.indices(
        ticket.step,
        num_examples=mechanism.num_examples,
        key=int.from_bytes(words.astype("<u4").tobytes(), "little"),
    )
    return Batch(*load_shards(load, indices, mechanism, sharding), ticket)


def shapes_of_batch(load: Load) -> PyTree:
    """One example of zeros, with the shapes and dtypes of every other one."""
    rows = load(np.zeros(0, np.int64))
    return jax.tree.map(lambda x: np.zeros((1, *x.shape[1:]), x.dtype), rows)


@contextlib.contextmanager
def prefetched(
    draw: Callable[[Ticket], T], tickets: Iterable[Ticket], *, depth: int
) -> Iterator[Iterator[T]]:
    """Gives an iterator over `draw(ticket)` for all tickets, in order.

    One thread draws up to `depth` batches ahead, one after the other. An exception of
    `draw` is raised when the iterator comes to its ticket. A depth of 0 draws every
    batch when it is asked for, without a thread. The tickets are taken in the calling
    thread.

    The thread has ended when the context ends. After an exception, the context waits
    five seconds for the batch that is being drawn, and then leaves the thread alone.

    >>> with prefetched(lambda ticket: ticket**2, range(4), depth=2) as batches:
    ...     print(list(batches))
    [0, 1, 4, 9]
    """
    if depth == 0:
        yield map(draw, tickets)
        return
    jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # Not a ThreadPoolExecutor: Python waits for its threads when it exits.
    thread = threading.Thread(target=_work, args=(draw, jobs), daemon=True)
    thread.start()
    try:
        yield _in_order(jobs, tickets, depth)
    except BaseException:
        while not jobs.empty():
            jobs.get()
        jobs.put(None)
        thread.join(_SECONDS_TO_END)
        raise
    jobs.put(None)
    thread.join()


def _work(draw: Callable[[Ticket], T], jobs: queue.SimpleQueue[Any]) -> None:
    while (job := jobs.get()) is not None:
        ticket, result = job
        try:
            result.put((draw(ticket), None))
        except BaseException as error:
            result.put((None, error))


def _in_order(
    jobs: queue.SimpleQueue[Any], tickets: Iterable[Ticket], depth: int
) -> Iterator[Any]:
    waiting: collections.deque[queue.SimpleQueue[Any]] = collections.deque()
    for ticket in tickets:
        waiting.append(queue.SimpleQueue())
        jobs.put((ticket, waiting[-1]))
        # While the oldest of these is in use, the others are drawn.
        if len(waiting) > depth:
            yield _result(waiting.popleft())
    while waiting:
        yield _result(waiting.popleft())


def _result(finished: queue.SimpleQueue[Any]) -> Any:
    batch, error = finished.get()
    if error is not None:
        raise error
    return batch
