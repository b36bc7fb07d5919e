"""Poisson sampling: draws the indices of a batch from a key and a step number.

Random batches make training more private, because an example takes part in few steps.
The accountant counts on this gain, which is proved for Poisson sampling: every example
is in a batch with the same probability, independently of all other examples. The
indices of a batch and its size are sensitive.
"""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from dpmp import _validate
from dpmp._numbers import as_number

__all__ = ["PoissonSampling"]

_WORD = 2**64

# Each key and step has two independent streams of random words.
_INCLUSION, _TRUNCATION = 0, 1


@dataclass(frozen=True)
class PoissonSampling:
    """Includes each example in each batch independently with the same probability.

    >>> sampling = PoissonSampling(sampling_prob=0.25, iterations=3)
    >>> for step in range(3):
    ...     print(sampling.indices(step, num_examples=12, key=7))
    [4 8]
    [ 2  5  7 10]
    [ 5  7 11]

    Guarantees:
      - The batch is a function of (key, step, num_examples). Any batch can be drawn
        without the batches before it, and drawn again after a restart. The function
        uses the raw words of a counter-based generator (Philox), which NumPy keeps
        unchanged.
      - The probability of inclusion is `sampling_prob` rounded down to a multiple of
        2^-64.
      - A batch of more than `truncated_batch_size` examples is replaced by that many of
        its examples, drawn uniformly. Account for this with
        `accounting.truncated_dpsgd_event`.

    Attributes:
      sampling_prob: the probability that an example is in a batch, in (0, 1].
      iterations: the number of batches.
      truncated_batch_size: the size of the largest batch, or None for no limit.

    References:
      [Chua et al.: Scalable DP-SGD, Poisson subsampling and
      truncation](https://arxiv.org/abs/2411.04205)
    """

    sampling_prob: float
    iterations: int
    truncated_batch_size: int | None = None

    def __post_init__(self):
        checks = [
            ("sampling_prob", _validate.probability, "Use 0.01, for example."),
            ("iterations", _validate.positive_integer, "Use 1000, for example."),
            ("truncated_batch_size", _validate.positive_integer, "Use 32, or None."),
        ]
        for name, check, fix in checks:
            given = getattr(self, name)
            if given is not None or name != "truncated_batch_size":
                object.__setattr__(self, name, check(**{name: given}, fix=fix))

    def indices(self, step: int, *, num_examples: int, key: int) -> np.ndarray:
        """Draws the indices of one batch, which are sensitive.

        Args:
          step: the number of the batch, from 0 to `iterations` - 1.
          num_examples: the size of the dataset.
          key: an integer from 0 to 2^128 - 1. Use each key for one run on one dataset.

        Returns:
          Ascending int64 indices below `num_examples`. There may be none.

        Raises:
          ValueError: if the step or the key is out of range, or the dataset is empty.
        """
        step, key = as_number(step), as_number(key)
        _validate.require(
            _validate.is_integer(step) and 0 <= step < self.iterations,
            f"step must be from 0 to iterations - 1 = {self.iterations - 1}",
            step=step,
            fix="Privacy is accounted for `iterations` batches. Plan more of them "
            "before the run starts.",
        )
        num_examples = _validate.positive_integer(
            num_examples=num_examples, fix="Load the data first."
        )
        _validate.require(
            _validate.is_integer(key) and 0 <= key < 2**128,
            "key must be an integer from 0 to 2^128 - 1",
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
        """Yields the indices of all batches in order; see `indices`.

        Args:
          num_examples: the size of the dataset.
          rng: a NumPy generator from which the key is drawn, or the key itself. None
            draws a key of 128 bits from the operating system.
        """
        if isinstance(rng, np.random.Generator):
            rng = int.from_bytes(rng.bytes(16), "little")
        key = secrets.randbits(128) if rng is None else rng
        for step in range(self.iterations):
            yield self.indices(step, num_examples=num_examples, key=key)


def pad_indices(indices: np.ndarray, batch_size: int) -> np.ndarray:
    """Pads the indices of a batch with -1, so that all batches have one size.

    The mask `is_padding_example` of the padded batch is `padded < 0`. More than
    `batch_size` indices raise ValueError.

    >>> print(pad_indices(np.array([3, 8]), 4))
    [ 3  8 -1 -1]
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
    counter = np.array([0, 0, stream, step], np.uint64)
    key_words = np.array([key % _WORD, key // _WORD], np.uint64)
    return np.random.Philox(counter=counter, key=key_words).random_raw(size)
