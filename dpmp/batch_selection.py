"""Poisson sampling: from a key and a step to the indices of a batch.

The accountant's amplification by sampling holds for batches in which every example is
included independently of all others. Which examples are in a batch, and how many, is
sensitive.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from dpmp import _random, _validate
from dpmp._numbers import as_number

_WORD = 2**64

# Streams of one key and step.
_INCLUSION, _TRUNCATION = 0, 1


@dataclass(frozen=True)
class PoissonSampling:
    """Includes each example in each batch independently, with one probability.

    >>> sampling = PoissonSampling(sampling_prob=0.25, iterations=3)
    >>> for step in range(3):
    ...     print(sampling.indices(step, num_examples=12, key=7))
    [4 8]
    [ 2  5  7 10]
    [ 5  7 11]

    Guarantees:
      - `indices` is a function of (key, step, num_examples): the batch of any step can
        be had without those before it, and again after a restart. It uses the raw
        words of a counter-based generator (Philox), which NumPy keeps unchanged.
      - The probability of inclusion is `sampling_prob` rounded down to a multiple of
        2^-64.
      - With `truncated_batch_size`, a batch that is larger is replaced by a uniformly
        random part of it. Account for that with `accounting.truncated_dpsgd_event`.

    Attributes:
      sampling_prob: the probability of inclusion, in (0, 1].
      iterations: the number of batches.
      truncated_batch_size: the largest batch, or None.

    References:
      [Chua et al.: Scalable DP-SGD, Poisson subsampling and
      truncation](https://arxiv.org/abs/2411.04205)
    """

    sampling_prob: float
    iterations: int
    truncated_batch_size: int | None = None

    def __post_init__(self):
        checked: dict[str, Any] = {
            "sampling_prob": _validate.probability(
                sampling_prob=self.sampling_prob,
                fix="Use expected_batch_size / num_examples.",
            ),
            "iterations": _validate.positive_integer(
                iterations=self.iterations, fix="Use the number of steps accounted for."
            ),
        }
        if self.truncated_batch_size is not None:
            checked["truncated_batch_size"] = _validate.positive_integer(
                truncated_batch_size=self.truncated_batch_size,
                fix="Use accounting.choose_truncated_batch_size, or None.",
            )
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def indices(self, step: int, *, num_examples: int, key: int) -> np.ndarray:
        """The examples of one batch, sensitive.

        Args:
          step: which batch, from 0 to `iterations` - 1.
          num_examples: the size of the dataset.
          key: an integer below 2^128; use one key for one run on one dataset.

        Returns:
          Ascending int64 indices below `num_examples`, possibly none.

        Raises:
          ValueError: for a step outside of the accounted range, an empty dataset or a
            key out of range.
        """
        step, key = as_number(step), as_number(key)
        _validate.require(
            _validate.is_integer(step) and 0 <= step < self.iterations,
            f"step must be from 0 to iterations - 1 = {self.iterations - 1}",
            step=step,
            fix="Privacy is accounted for `iterations` batches; plan more of them "
            "before the run starts.",
        )
        num_examples = _validate.positive_integer(
            num_examples=num_examples, fix="Load the data first."
        )
        _validate.require(
            _validate.is_integer(key) and 0 <= key < 2**128,
            "key must be an integer of at most 128 bits",
            key_type=type(key).__name__,
            fix="Use secrets.randbits(128), and keep it secret.",
        )
        threshold = int(Fraction(self.sampling_prob) * _WORD)
        words = _random_words(key, step, _INCLUSION, num_examples)
        is_included = words <= np.uint64(threshold - 1) if threshold else words < 0
        included = np.flatnonzero(is_included)
        size = self.truncated_batch_size
        if size is None or len(included) <= size:
            return included
        ranks = np.argsort(_random_words(key, step, _TRUNCATION, len(included)))
        return np.sort(included[ranks[:size]])

    def batch_iterator(
        self, num_examples: int, rng: np.random.Generator | int | None = None
    ) -> Iterator[np.ndarray]:
        """Yields the batches of all iterations in order, as `indices` gives them.

        Args:
          num_examples: the size of the dataset.
          rng: a NumPy generator to draw the key from, or the key itself; None for 128
            bits from the system.

        Yields:
          Ascending int64 indices, sensitive.
        """
        if isinstance(rng, np.random.Generator):
            key = int.from_bytes(rng.bytes(16), "little")
        else:
            key = _random.fresh_integer() if rng is None else rng
        for step in range(self.iterations):
            yield self.indices(step, num_examples=num_examples, key=key)


def pad_indices(indices: np.ndarray, batch_size: int) -> np.ndarray:
    """Appends -1 up to a static size; `padded < 0` is `is_padding_example`.

    >>> print(pad_indices(np.array([3, 8]), 4))
    [ 3  8 -1 -1]

    Args:
      indices: (k,) integers.
      batch_size: the static size, at least k.

    Returns:
      (batch_size,) integers.

    Raises:
      ValueError: if the batch is larger than `batch_size`.
    """
    batch_size = as_number(batch_size)
    _validate.require(
        len(indices) <= batch_size,
        "batch_size must be at least the size of the largest possible batch",
        batch_size=batch_size,
        fix="Sample with truncated_batch_size=batch_size, and account for it.",
    )
    padding = np.full(batch_size - len(indices), -1, indices.dtype)
    return np.concatenate([indices, padding])


def _random_words(key: int, step: int, stream: int, size: int) -> np.ndarray:
    """`size` uniform 64-bit words, a function of the arguments."""
    counter = np.array([0, 0, stream, step], np.uint64)
    key_words = np.array([key % _WORD, key // _WORD], np.uint64)
    return np.random.Philox(counter=counter, key=key_words).random_raw(size)
