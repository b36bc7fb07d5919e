"""Compares sums of neighbouring batches, as a training loop computes them."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np

from dpmp import _plain_text, _validate
from dpmp._typing import PyTree
from dpmp.numerics import is_grid

_FAR = 0.5  # of the sensitivity: a clipped example changes a sum by nearly all of it
ROUNDING = 1e-9  # for the norm of a change, which is computed in float64


@dataclasses.dataclass(frozen=True)
class SumsAudit:
    """What comparing sums found; `str` describes it.

    Attributes:
      largest_change: the largest change of a sum by one example, over the sensitivity.
      reads_padding: whether the content of a row changes the sum, although the mask
        says that it is padding.
    """

    largest_change: float
    reads_padding: bool

    @property
    def passed(self) -> bool:
        """Whether an example changes a sum by no more than the noise is for."""
        return self.largest_change <= 1 + ROUNDING and not self.reads_padding

    def __str__(self) -> str:
        change = "as claimed" if self.largest_change <= 1 + ROUNDING else "FALSE"
        text = (
            f"One example changes the sum by at most {self.largest_change:.4f} of the "
            f"sensitivity ({change})."
        )
        if self.largest_change < _FAR:
            text += (
                " Either no example was clipped, so that clipping was not tested: pass "
                "examples with larger gradients. Or the noise is wider than it must "
                "be, as that of a sum is for a mean."
            )
        if self.reads_padding:
            text += (
                " Rows of padding change the sum too, which makes the claim FALSE: the "
                "mask is inverted or not used, or something is computed across the "
                "batch."
            )
        return _plain_text.paragraph(text)


def sums(
    sum_of_batch: Callable[[PyTree, np.ndarray], PyTree],
    batch: PyTree,
    *,
    sensitivity: float,
) -> SumsAudit:
    """Checks the sums of a loop of your own, which receive the noise.

    Each example in turn is replaced by padding, as `pad_indices` does it: the row holds
    another example, and the mask says that it does not count. The sum may change by the
    sensitivity. Then the row holds yet another example: nothing may change. The same is
    measured where all other rows are padding. This finds clipping that lets too much of
    an example through, statistics of the batch (such as its size), and masks that are
    inverted or forgotten. It says nothing about noise or sampling, nor about a sum that
    is kept from an earlier step.

    >>> def loss(w, x):
    ...     return jnp.mean((x @ w - 1.0) ** 2)
    >>> grad_fn = clipped_grad(loss, l2_clip_norm=1.0, arithmetic="exact")
    >>> def sum_of_batch(x, is_padding):
    ...     x = x - x.mean(0)  # a mistake
    ...     return grad_fn(jnp.zeros(3), x, is_padding_example=is_padding)
    >>> x = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    >>> stddev, noise_multiplier = 2.0, 2.0  # of the noise that the loop adds
    >>> sums(sum_of_batch, x, sensitivity=stddev / noise_multiplier).passed
    False

    The numbers have no noise: use public or synthetic data, or keep them to yourself.

    Args:
      sum_of_batch: a function of a batch and of `is_padding_example`, (B,) bool, that
        returns what the noise is added to: a tree of arrays, or of a `GridArray`. All
        that the loop does with a batch before the noise belongs into it.
      batch: arrays with an axis of B examples, 3 or more. Extreme examples find most:
        huge ones, and some without a gradient. Ten to a hundred are enough.
      sensitivity: what the noise is for, in the unit of the sum: its standard deviation
        over the noise multiplier. The `.sensitivity()` of the function that computes
        the sum is the same, unless noise and sum are for different clip norms.

    Returns:
      The largest change, and whether padding changes anything.

    Raises:
      ValueError: if `sensitivity` is not positive, or `batch` has no axis of examples.
    """
    _validate.function("batch", "is_padding_example", sum_of_batch=sum_of_batch)
    sensitivity = _validate.positive(
        sensitivity=sensitivity, fix="Use stddev / noise_multiplier of the noise."
    )
    rows = {len(x) if np.ndim(x) else 0 for x in jax.tree.leaves(batch)}
    size = rows.pop() if len(rows) == 1 else 0
    if size < 3:
        _validate.fail(
            "batch must have at least three examples, along the first axis of all "
            "arrays. Pass ten to a hundred."
        )

    def vector(rows: Sequence[int], shift: int = 0) -> np.ndarray:
        """The sum if some rows are padding, which holds examples further on."""
        mask = np.isin(np.arange(size), rows)
        places = np.where(mask, (np.arange(size) + shift) % size, np.arange(size))
        return as_vector(sum_of_batch(jax.tree.map(lambda x: x[places], batch), mask))

    everything, changes, reads_padding = range(size), [], False
    whole, empty = vector([]), vector(everything)
    for i in everything:
        one, other = vector([i], -1), vector([i], 1)
        alone = vector([j for j in everything if j != i])
        changes += [np.linalg.norm(one - whole), np.linalg.norm(alone - empty)]
        reads_padding |= not np.array_equal(one, other, equal_nan=True)
    largest = math.inf if np.isnan(changes).any() else float(max(changes))
    return SumsAudit(largest / sensitivity, reads_padding)


def as_vector(total: PyTree) -> np.ndarray:
    """All entries of a sum, or of counts on grids, in float64."""
    pairs = [
        (x.counts, x.unit) if is_grid(x) else (x, 1.0)
        for x in jax.tree.leaves(total, is_leaf=is_grid)
    ]
    return np.concatenate([np.asarray(x, np.float64).ravel() * u for x, u in pairs])
