"""Secret random bits: a ticket has the keys of one step, and each key is used once.

Nothing stores them: no state, checkpoint, ledger or program. So a run that goes on, a
copied trainer or a forked process has no key that was used before.
"""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import jax
import numpy as np

from dpmp import _processes, _random, _validate
from dpmp._random import threefry4x32
from dpmp._typing import PyTree
from dpmp.mechanism import DPSGD
from dpmp.sources import Load, load_shards

# The uses of the keys of a step; each key is (4,) uint32.
_USES = ("batch", "noise", "model", "update")
_WORDS = 4 * len(_USES)

_USED = object()  # in place of a key that was taken

_BLOCK = 256  # the tickets on which several processes agree at once


class Ticket:
    """The keys of one step. Each can be taken once, in the process of the ticket."""

    __slots__ = ("_keys", "_process", "step")

    def __init__(self, step: int, words: np.ndarray | None = None):
        """The ticket of a step, counted from 0; `words` has the keys, (16,) uint32.

        By default, the operating system draws each key when it is taken, so that a
        snapshot of the machine has no key.
        """
        keys = [None] * len(_USES) if words is None else words.reshape(len(_USES), 4)
        self.step, self._process = step, os.getpid()
        self._keys: dict[str, Any] = dict(zip(_USES, keys, strict=True))

    def take(self, *uses: str) -> list[np.ndarray]:
        """Takes keys, (4,) uint32 each, so that nobody can take them again."""
        keys = [self._keys.pop(use, _USED) for use in uses]
        if self._process != os.getpid() or any(x is _USED for x in keys):
            _validate.fail(
                "the random numbers of a step must be used once, in the process that "
                "drew them. Load another batch: with the same batch or noise, two "
                "steps would reveal what the accounting assumes to be secret.",
                uses=uses,
                error=RuntimeError,
            )
        return [_fresh_words(4) if x is None else x for x in keys]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a ticket has secret keys, and cannot be copied or pickled")


def draw_tickets(
    steps: Iterable[int],
    root: "Root | None",
    times_made: Callable[[int], int] = lambda step: 0,
    start: int = 0,
) -> Iterator[Ticket]:
    """Yields a ticket for each step; several processes must draw the same tickets.

    With `root`, tickets are a function of this key, the step, and how often the step
    was made before, under this key or another. None draws them from the operating
    system. `start` is where a run goes on that ties its steps together. Otherwise, a
    run that was interrupted would have the noise of one that was not, with other
    batches.
    """
    shared = _shared_words()
    for step in steps:
        if root is not None:
            yield Ticket(step, _derived(root, step, start, times_made(step)))
        else:
            yield Ticket(step, None if jax.process_count() == 1 else next(shared))


def _shared_words() -> Iterator[np.ndarray]:
    """Fresh words on which several processes agree, for many tickets at once."""
    while True:
        words = _processes.broadcast(_fresh_words(_WORDS * _BLOCK))
        yield from words.reshape(_BLOCK, _WORDS)


def _fresh_words(number: int) -> np.ndarray:
    return np.frombuffer(os.urandom(4 * number), np.uint32)


class Root:
    """The words of a secret key, (4,) uint32, which no report of variables shows."""

    __slots__ = ("words",)

    def __init__(self, words: np.ndarray):
        self.words = words

    @property
    def digest(self) -> bytes:
        """A hash by which processes compare their keys."""
        return hashlib.blake2b(self.words.tobytes()).digest()


def root_of(prng_key: jax.Array | Root | None) -> Root | None:
    """The words of a key for reproducible runs; None for None."""
    if prng_key is None or isinstance(prng_key, Root):
        return prng_key
    _random.check_key(prng_key)
    return Root(np.asarray(_random.key_words(prng_key)))


def check_copy(root: Root | None) -> None:
    """Raises TypeError if the copy of a trainer would have a key."""
    if root is not None:
        raise TypeError(
            "a trainer with a prng_key cannot be copied or pickled: the key is secret, "
            "and two copies would use the same noise. Make another one."
        )


def _derived(root: Root, step: int, start: int, times_made: int) -> np.ndarray:
    """The words of a ticket, from Threefry with a counter that no other ticket has."""
    # A start is below 2^30, so that each start has uses of its own.
    use = np.arange(len(_USES), dtype=np.uint32) + np.uint32(len(_USES) * start)
    key = [np.full_like(use, x) for x in root.words]
    counter = [np.full_like(use, x) for x in (step % 2**32, step >> 32, times_made)]
    words = threefry4x32(key, [use, *counter])
    return np.stack([np.asarray(x) for x in words], axis=1).reshape(-1)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Batch:
    """A sensitive batch that was drawn for one step, with the ticket of this step."""

    examples: PyTree  # arrays with a leading axis of `mechanism.padded_batch_size`
    is_padding_example: Any  # (padded_batch_size,) bool
    ticket: Ticket
    mechanism: DPSGD  # it has drawn the batch


def draw_batch(
    mechanism: DPSGD,
    load: Load,
    sharding: Any,
    ticket: Ticket,
    draw: Callable[[int, int], np.ndarray] | None = None,
) -> Batch:
    """Draws and loads the batch of a ticket.

    `draw` is the `drawer` of a run. None is for steps that are made alone.
    """
    (words,) = ticket.take("batch")
    if draw is None:
        draw = mechanism.batch_selection_strategy.drawer(mechanism.num_examples)
    try:
        key = int.from_bytes(words.astype("<u4").tobytes(), "little")
        indices = draw(ticket.step, key)
        batch = load_shards(load, indices, mechanism, sharding)
        return Batch(*batch, ticket, mechanism)
    except MemoryError:  # it would show the size of the batch
        pass
    raise MemoryError("there must be enough memory to draw and load a batch")
