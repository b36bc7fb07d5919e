"""The batches of a run: which examples take part in a step, and how many.

The size of a batch is drawn from the binomial distribution, and then that many examples
uniformly: docs/proofs.md shows why. So the time to draw a batch is proportional to its
size and not to the size of the dataset.

Truncation needs no draw of its own: a uniform subset of a uniform subset is a uniform
subset. So a batch that would be too large is drawn at the largest size to begin with.
"""

import abc
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from dpmp import _validate
from dpmp._validate import as_number
from dpmp.batch_selection._draws import (
    draw_binomial,
    draw_subset,
    key_of,
    random_words,
)


class Sampling(abc.ABC):
    """What `PoissonSampling` and `RandomAllocation` have in common."""

    iterations: int
    num_examples: int | None

    @abc.abstractmethod
    def drawer(
        self, num_examples: int, *, start: int = 0
    ) -> Callable[[int, int], np.ndarray]:
        """A function from a step and its key to the indices of a batch, int64.

        A loop calls it for all steps of a run in order, from `start` on.
        """

    def batch_iterator(
        self,
        num_examples: int | None = None,
        rng: np.random.Generator | int | None = None,
        *,
        start: int = 0,
    ) -> Iterator[np.ndarray]:
        """Yields the indices of all batches in order, ascending int64.

        Args:
          num_examples: the size of the dataset. A sampling of a mechanism knows it.
          rng: a NumPy generator from which the key is drawn, or the key itself. None
            draws a key of 128 bits from the operating system. Epsilon takes the
            batches for secret, so pass a key only in tests, and for one iterator.
          start: the first step, if a run goes on: the number of steps that were ever
            begun.
        """
        if isinstance(rng, np.random.Generator):
            rng = int.from_bytes(rng.bytes(16), "little")
        key = secrets.randbits(128) if rng is None else rng
        draw = self.drawer(self._size_for(num_examples), start=start)
        for step in range(self._first_step(start), self.iterations):
            yield draw(step, key)

    def _size_for(self, given: Any, *, least: int = 1) -> int:
        """The size of the dataset; ValueError if it is not that of the mechanism."""
        known = self.num_examples
        if known is not None and given is not None and as_number(given) != known:
            _validate.fail(
                "num_examples must be that of the mechanism, whose noise is not for "
                "any other. Leave it out, or make a mechanism for this dataset."
            )
        return _validate.integer_in(
            range(least, 2**63),
            f"num_examples must be an integer from {least} to 2^63 - 1. Pass the size "
            "of the dataset.",
            num_examples=known if given is None else given,
        )

    def _first_step(self, start: Any) -> int:
        """The step from which a run goes on; ValueError if there is no such step."""
        return _validate.integer_in(
            range(self.iterations + 1),
            f"start must be from 0 to iterations = {self.iterations}. Pass the "
            "number of steps that were made.",
            start=start,
        )


@dataclass(frozen=True)
class PoissonSampling(Sampling):
    """Includes each example in each batch independently with the same probability.

    >>> sampling = PoissonSampling(sampling_prob=0.25, iterations=3)
    >>> for step in range(3):
    ...     print(sampling.indices(step, num_examples=12, key=7))
    [1 2 8 9]
    [0 2]
    [0 7]

    Guarantees:
      - The distribution of a batch is within a total variation distance of 2^-180 of
        including each example independently with exactly `sampling_prob`. This holds
        for every size of the dataset. `DPSGD` charges the distance to delta.
      - A batch of more than `truncated_batch_size` examples is replaced by that many of
        its examples, drawn uniformly. Account for this with
        `accounting.truncated_dpsgd_event`.
      - The batch is a function of (key, step, num_examples), `sampling_prob` and
        `truncated_batch_size`. Any batch can be drawn without the batches before it,
        and drawn again after a restart. The function uses the raw words of a
        counter-based generator (Philox), which NumPy keeps unchanged, and integer
        arithmetic.
      - The time to draw a batch depends on its size, and slightly on its indices. This
        is not hidden from someone who can measure it.

    Attributes:
      sampling_prob: the probability that an example is in a batch, in (0, 1].
      iterations: the number of batches.
      truncated_batch_size: the size of the largest batch, or None for no limit.
      cycle_length: the number of groups of examples, which take turns: in a step, only
        examples take part whose index has the remainder of the step modulo this number.
      num_examples: the size of the dataset that the sampling was accounted for, and no
        other; None for any, which the methods are then given.

    References:
      [Chua et al.: Scalable DP-SGD, Poisson subsampling and
      truncation](https://arxiv.org/abs/2411.04205)
    """

    sampling_prob: float
    iterations: int
    truncated_batch_size: int | None = None
    cycle_length: int = 1
    num_examples: int | None = field(default=None, compare=False)

    def __post_init__(self):
        _validate.fields(
            self,
            sampling_prob=_validate.probability,
            iterations=_validate.positive_integer,
            truncated_batch_size=_validate.optional(_validate.positive_integer),
            cycle_length=_validate.positive_integer,
        )

    def indices(self, step: int, *, num_examples: int, key: int) -> np.ndarray:
        """Draws the indices of one batch, which are sensitive.

        Args:
          step: the number of the batch, from 0 to `iterations` - 1.
          num_examples: the size of the dataset.
          key: an integer from 0 to 2^128 - 1. Use each key for one run on one dataset.

        Returns:
          Ascending int64 indices below `num_examples`. There may be none.

        Raises:
          ValueError: if the step or the key is out of range, or if the dataset is empty
            or has 2^63 examples or more.
        """
        step = _validate.integer_in(
            range(self.iterations),
            f"step must be from 0 to iterations - 1 = {self.iterations - 1}. Plan more "
            "`iterations` before the run starts: privacy is accounted for them.",
            step=step,
        )
        num_examples = self._size_for(num_examples, least=self.cycle_length)
        group = step % self.cycle_length
        size_of_group = len(range(group, num_examples, self.cycle_length))
        draw_words = random_words(key_of(key), step)
        count = draw_binomial(size_of_group, Fraction(self.sampling_prob), draw_words)
        size = min(count, self.truncated_batch_size or count)
        members = draw_subset(size_of_group, size, draw_words)
        return members * self.cycle_length + group

    def drawer(
        self, num_examples: int, *, start: int = 0
    ) -> Callable[[int, int], np.ndarray]:
        """A function from a step and its key to `indices`; it needs no `start`."""
        del start
        return lambda step, key: self.indices(step, num_examples=num_examples, key=key)


def pad_indices(indices: np.ndarray, batch_size: int) -> np.ndarray:
    """Pads the indices of a batch with -1, so that all batches have one size.

    The mask `is_padding_example` of the padded batch is `padded < 0`.

    >>> print(pad_indices(np.array([3, 8]), 4))
    [ 3  8 -1 -1]

    Args:
      indices: (k,) signed integers.
      batch_size: the size of every batch, such as `DPSGD.padded_batch_size`.

    Returns:
      (batch_size,) integers.

    Raises:
      ValueError: if `indices` is not a vector of signed integers, or if it is longer
        than `batch_size`. The message shows neither the indices nor their number,
        because both are sensitive.
    """
    indices = np.asarray(indices)
    if indices.ndim != 1 or not np.issubdtype(indices.dtype, np.signedinteger):
        _validate.fail(
            "indices must be a vector of signed integers. Pass the result of "
            "PoissonSampling.indices.",
            dtype=indices.dtype.name,
            ndim=indices.ndim,
        )
    batch_size = as_number(batch_size)
    if len(indices) > batch_size:
        _validate.fail(
            "batch_size must be at least the size of the largest possible batch. "
            "Sample with truncated_batch_size=batch_size, and account for it.",
            batch_size=batch_size,
        )
    padding = np.full(batch_size - len(indices), -1, indices.dtype)
    return np.concatenate([indices, padding])
