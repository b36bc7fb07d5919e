"""Loading a batch on the host: from a dataset and indices to padded arrays."""

from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.batch_selection import pad_indices


class Source(Protocol):
    """A dataset that gives the examples of a batch at once."""

    def __getitem__(self, indices: np.ndarray, /) -> PyTree:
        """Examples at (k,) int64 indices: arrays of shape (k, ...), k possibly 0."""
        ...


def as_source(source: PyTree | Source, num_examples: int) -> Source:
    """Gives a pytree of arrays the interface of a `Source`, and checks the size."""
    is_arrays = all(hasattr(x, "shape") for x in jax.tree.leaves(source))
    sizes = {np.shape(x)[:1] for x in jax.tree.leaves(source)} if is_arrays else None
    length = getattr(source, "__len__", None)
    if not is_arrays and length is not None:
        sizes = {(length(),)}
    _validate.require(
        sizes is None or sizes == {(num_examples,)},
        f"the source must hold the {num_examples} examples of the mechanism",
        sizes=sizes,
        fix="Build the mechanism with num_examples=len(data): sampling and accounting "
        "depend on it.",
    )
    _validate.require(
        is_arrays
        or (hasattr(source, "__getitem__") and not isinstance(source, list | dict)),
        "the source must be arrays, or an object with __getitem__",
        source=type(source).__name__,
        fix="See dpmp.training.Source.",
    )
    return _Arrays(source) if is_arrays else source


def load_batch(
    source: Source, indices: np.ndarray, batch_size: int
) -> tuple[PyTree, np.ndarray]:
    """The batch and `is_padding_example`; padding is zeros, not data."""

    def pad(x):
        x = np.asarray(x)
        # Neither number may be shown: how many examples a batch has is sensitive.
        if len(x) != len(indices):
            raise ValueError(
                "the source must return one row for each index it is given. "
                "See dpmp.training.Source."
            )
        return np.pad(x, [(0, batch_size - len(indices))] + [(0, 0)] * (x.ndim - 1))

    batch = jax.tree.map(pad, source[indices])
    return batch, pad_indices(indices, batch_size) < 0


@dataclass(frozen=True)
class _Arrays:
    """A `Source` over a pytree of arrays."""

    arrays: PyTree

    def __getitem__(self, indices: np.ndarray, /) -> PyTree:
        return jax.tree.map(lambda x: np.asarray(x)[indices], self.arrays)
