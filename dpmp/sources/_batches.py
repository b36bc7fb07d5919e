"""Loads batches: onto the devices that need their rows, and ahead of their steps.

Every process of a job draws the same indices and loads only the rows of its own
devices. With microbatches of m examples for each device, the first m examples go to the
first device, the next m to the second, and so on, in turn. So all devices have about
equally many examples, and a microbatch holds the same examples in the same places on
any number of devices.
"""

import collections
import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np

from dpmp import _processes, _validate
from dpmp._typing import PyTree
from dpmp._warnings import warn
from dpmp.batch_selection import pad_indices
from dpmp.mechanism import DPSGD
from dpmp.sources._source import Load, load_padded

S = TypeVar("S")
T = TypeVar("T")

# A source that hangs must not keep an interrupted program from ending.
_SECONDS_TO_END = 5.0


def check_sharding(sharding: Any, mechanism: DPSGD) -> None:
    """Raises ValueError unless `sharding` can divide the batches of `mechanism`."""
    if sharding is None and jax.process_count() != 1:
        _validate.fail(
            "batch_sharding must be given if there are several processes. Use "
            'jax.NamedSharding(mesh, jax.P("data")) with a mesh of all devices.',
            num_processes=jax.process_count(),
        )
    if sharding is None:
        return
    fix = 'Use jax.NamedSharding(mesh, jax.P("data")).'
    _validate.instance(jax.sharding.Sharding, fix, batch_sharding=sharding)
    if not _processes.span_all(sharding):
        _validate.fail(
            "batch_sharding must have devices of every process. Otherwise processes "
            "would add the same noise to different sums. Use a mesh of jax.devices().",
            num_processes=jax.process_count(),
        )
    spec = tuple(getattr(sharding, "spec", ()))
    if any(spec[1:]):
        _validate.fail(
            "batch_sharding must divide a batch along its first axis, that of the "
            "examples, and along no other",
            fix=fix,
            batch_sharding=jax.P(*spec),
        )
    num_shards = _num_shards(sharding)
    for name in ("padded_batch_size", "microbatch_size"):
        size = getattr(mechanism, name)
        if size is not None and size % num_shards != 0:
            _validate.fail(
                f"{name} must be a multiple of the {num_shards} parts into which "
                "batch_sharding divides a batch. Build the mechanism with a "
                f"microbatch_size that is a multiple of {num_shards}; batches are "
                "padded to a multiple of it.",
                size=size,
            )


def check_devices(params: PyTree, batch_sharding: Any) -> None:
    """Raises ValueError if batches and parameters are to be on different devices.

    Warns if several devices are to compute the same.
    """
    arrays = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
    spread = [x.sharding for x in arrays if len(x.sharding.device_set) > 1]
    if not spread:
        return
    is_divided = batch_sharding is not None and (
        not batch_sharding.is_fully_replicated
        or not all(x.is_fully_replicated for x in spread)
    )
    if not is_divided:
        warn(
            "the parameters are on several devices, but batches are not divided "
            "among them, so that each device may compute the whole step. Pass "
            'batch_sharding=jax.NamedSharding(mesh, jax.P("data")), or jax.P() for '
            "devices that divide the model alone."
        )
    if batch_sharding is None:
        return
    given = [_described(x) for x in (*spread, batch_sharding)]
    is_same = all(x.device_set == batch_sharding.device_set for x in spread)
    divided = [x for x in (*spread, batch_sharding) if not x.is_fully_replicated]
    meshes = {x.mesh.axis_names for x in divided if isinstance(x, jax.NamedSharding)}
    if not is_same or len(meshes) > 1:
        _validate.fail(
            "batch_sharding must have the mesh of the parameters, with its devices and "
            "axes. Use one mesh for both.",
            of_batches=given[-1],
            of_parameters=sorted({*given[:-1]}),
        )


def _described(sharding: Any) -> str:
    shape = dict(sharding.mesh.shape) if hasattr(sharding, "mesh") else ""
    return f"{len(sharding.device_set)} devices {shape}".rstrip()


def load_shards(
    load: Load, indices: np.ndarray, mechanism: DPSGD, sharding: Any
) -> tuple[PyTree, Any]:
    """Loads a padded batch and `is_padding_example`, committed to a sharding if any."""
    batch_size = mechanism.padded_batch_size
    padded = pad_indices(indices, batch_size)
    if sharding is None:
        return load_padded(load, padded), padded < 0
    if isinstance(sharding, jax.NamedSharding):
        # P("data", None) is for arrays of two axes, and labels have one.
        sharding = sharding.update(spec=jax.P(*sharding.spec[:1]))
    if mechanism.microbatch_size is not None:
        # Each shard in turn gets a part of a microbatch.
        num_shards = _num_shards(sharding)
        part_size = mechanism.microbatch_size // num_shards
        parts = padded.reshape(-1, num_shards, part_size)
        padded = parts.swapaxes(0, 1).reshape(-1)
    own_parts = sharding.addressable_devices_indices_map((batch_size,)).values()
    own = padded[np.unique([np.arange(batch_size)[part[0]] for part in own_parts])]

    def commit(x: np.ndarray) -> jax.Array:
        shape = batch_size, *x.shape[1:]
        return jax.make_array_from_process_local_data(sharding, x, shape)

    return jax.tree.map(commit, (load_padded(load, own), own < 0))


def _num_shards(sharding: Any) -> int:
    """The number of parts into which a sharding divides the first axis."""
    # An axis with one entry for each device: the size of a shard tells the number.
    length = len(sharding.device_set)
    return length // sharding.shard_shape((length,))[0]


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
