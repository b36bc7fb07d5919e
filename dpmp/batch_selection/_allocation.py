"""Random allocation: in every epoch, each example takes part in one step.

The step of an example is a word of a random stream, reduced modulo the number of steps.
So the examples are independent of each other, and no permutation is needed. Words that
would favour some of the steps are replaced by words of another stream.

To find the examples of one step, the words of all have to be drawn. One pass over them
finds the examples of as many steps as fit in memory. So an epoch of a large dataset
takes several passes, and never a table of the size of the dataset.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dpmp import _validate
from dpmp.batch_selection._draws import (
    draw_subset,
    key_of,
    last_fair_word,
    random_words,
)
from dpmp.batch_selection._poisson import PoissonSampling, Sampling

# The number of examples that one pass keeps, on average, and that are drawn at once.
_KEPT, _AT_ONCE = 2**23, 2**20
# Random streams under one key, beside those of Poisson sampling.
_STEPS, _REPLACEMENTS, _TRUNCATION = 1, 2, 3


@dataclass(frozen=True)
class RandomAllocation(Sampling):
    """Lets each example take part in one step of every epoch, drawn uniformly.

    At the same noise, this is more private than Poisson sampling, where an example
    takes part in no step of an epoch, or in several.

    >>> sampling = RandomAllocation(steps_per_epoch=3, iterations=3)
    >>> for batch in sampling.batch_iterator(num_examples=12, rng=7):
    ...     print(batch)
    [ 3  5 10]
    [0 1 6 8]
    [ 2  4  7  9 11]

    Guarantees:
      - Examples are independent of each other: removing one does not move the others.
        Each step of an epoch is equally likely, with no error at all, and epochs are
        independent.
      - A batch of more than `truncated_batch_size` examples is replaced by that many of
        its examples, drawn uniformly. Account for this with
        `accounting.random_allocation_event`.
      - An epoch ties its steps together by a key. Where a run goes on inside an epoch
        without this key, the rest of that epoch is Poisson sampling, which costs more.
      - The batches are a function of keys, steps and sizes, as those of
        `PoissonSampling` are. The time to draw one depends a little on its size.

    Time and memory: every epoch takes `num_examples` / 2^23 passes, rounded up, over a
    random stream of all examples. A pass takes about 30 ns an example, and keeps about
    0.2 GB at most.

    Attributes:
      steps_per_epoch: the number of steps of an epoch.
      iterations: the number of batches.
      truncated_batch_size: the size of the largest batch, or None for no limit.
      num_examples: as in `PoissonSampling`.

    References:
      [Feldman and Shenfeld: Privacy amplification by random
      allocation](https://arxiv.org/abs/2502.08202); [Chua et al.: Balls-and-bins
      sampling for DP-SGD](https://arxiv.org/abs/2412.16802)
    """

    steps_per_epoch: int
    iterations: int
    truncated_batch_size: int | None = None
    num_examples: int | None = field(default=None, compare=False)

    def __post_init__(self):
        _validate.fields(
            self,
            steps_per_epoch=functools.partial(
                _validate.integer_in,
                range(1, 2**63),
                "steps_per_epoch must be an integer from 1 to 2^63 - 1. Use "
                "num_examples over the expected batch size.",
            ),
            iterations=_validate.positive_integer,
            truncated_batch_size=_validate.optional(_validate.positive_integer),
        )

    def drawer(
        self, num_examples: int, *, start: int = 0
    ) -> Callable[[int, int], np.ndarray]:
        """A function from a step and a key to the indices of its batch.

        Call it for all steps of a run in order, from `start` on. The key of the first
        step of an epoch determines all batches of the epoch.

        Raises:
          ValueError: if a number is out of range; when called, for a step that is out
            of order.
        """
        num_examples = self._size_for(num_examples)
        start = next_step = self._first_step(start)
        rest_of_epoch = PoissonSampling(
            1 / self.steps_per_epoch, self.iterations, self.truncated_batch_size
        )
        epoch: _Epoch | None = None

        def draw(step: int, key: int) -> np.ndarray:
            nonlocal epoch, next_step
            if step != next_step:
                _validate.fail(
                    "batches of random allocation must be drawn in order, because an "
                    "epoch ties them together. Make another drawer to begin elsewhere.",
                    step=step,
                    next_step=next_step,
                )
            next_step += 1
            place = step % self.steps_per_epoch
            if step - place < start:
                return rest_of_epoch.indices(step, num_examples=num_examples, key=key)
            if place == 0:
                epoch = _Epoch(key_of(key), step, self.steps_per_epoch, num_examples)
            assert epoch is not None
            return epoch.indices(place, self.truncated_batch_size)

        return draw


class _Epoch:
    """The assignment of one epoch, of which a window of steps is in memory."""

    # So that no report of variables shows the key.
    __slots__ = ("_bounds", "_first", "_key", "_members", "_size", "_step", "_steps")

    def __init__(self, key: int, step: int, steps: int, num_examples: int):
        self._key, self._step, self._steps = key, step, steps
        self._size = num_examples
        self._first, self._bounds = 0, np.zeros(1, np.int64)
        self._members = np.zeros(0, np.int64)

    def indices(self, place: int, limit: int | None) -> np.ndarray:
        if place >= self._first + len(self._bounds) - 1:
            self._fill(place)
        start, end = self._bounds[place - self._first :][:2]
        members = self._members[start:end]
        if limit is None or len(members) <= limit:
            return members
        draw_words = random_words(self._key, self._step + place, _TRUNCATION)
        return members[draw_subset(len(members), limit, draw_words)]

    def _fill(self, first: int) -> None:
        """Finds the examples of the steps from `first` on."""
        steps = min(max(1, _KEPT * self._steps // self._size), _KEPT)
        steps = min(steps, self._steps - first)
        streams = [
            random_words(self._key, self._step, x) for x in (_STEPS, _REPLACEMENTS)
        ]
        members, places = [], []
        for start in range(0, self._size, _AT_ONCE):
            number = min(_AT_ONCE, self._size - start)
            # Places before the first one wrap around to large numbers.
            place = _draw_places(number, self._steps, *streams) - np.uint64(first)
            found = np.flatnonzero(place < steps)
            members.append(start + found)
            places.append(place[found])
        place = np.concatenate(places).astype(np.int64)
        self._members = np.concatenate(members)[np.argsort(place, kind="stable")]
        self._bounds = np.append(0, np.cumsum(np.bincount(place, minlength=steps)))
        self._first = first


def _draw_places(
    number: int,
    steps: int,
    draw_words: Callable[[int], np.ndarray],
    draw_replacements: Callable[[int], np.ndarray],
) -> np.ndarray:
    """Draws the steps of some examples, uniformly distributed uint64."""
    words = draw_words(number)
    while len(unfair := np.flatnonzero(words > last_fair_word(steps))):
        words[unfair] = draw_replacements(len(unfair))
    return words % np.uint64(steps)
