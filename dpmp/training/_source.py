"""Loads a batch on the host: turns a dataset and indices into padded arrays."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

import jax
import numpy as np

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.batch_selection import pad_indices


class Source(Protocol):
    """A dataset that returns all examples of a batch at once.

    All batches must have the same tree of arrays, with the same dtypes and, except for
    the number of examples, the same shapes: pad sequences to one length. Another shape
    would need another compiled program, and the time to compile it would reveal what is
    in a batch.
    """

    def __getitem__(self, indices: np.ndarray, /) -> PyTree:
        """The examples at (k,) int64 indices, as arrays (k, ...); k may be 0."""
        ...

    def __len__(self) -> int:
        """The number of examples; sampling and accounting depend on it."""
        ...


Load: TypeAlias = Callable[[np.ndarray], PyTree]


def loader_of(source: PyTree | Source, num_examples: int) -> Load:
    """Checks a dataset; returns the function that loads the examples at indices."""
    leaves = jax.tree.leaves(source)
    is_arrays = all(hasattr(x, "shape") for x in leaves)
    has_interface = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    _validate.require(
        is_arrays or (has_interface and not isinstance(source, list | dict)),
        "the source must be arrays, or an object with __getitem__ and __len__",
        source=type(source).__name__,
        fix="See dpmp.training.Source.",
    )
    sizes = {np.shape(x)[:1] for x in leaves} if is_arrays else {(len(source),)}
    _validate.require(
        sizes == {(num_examples,)},
        f"the source must hold the {num_examples} examples of the mechanism",
        sizes=sizes,
        fix="Build the mechanism with num_examples=len(data): sampling and accounting "
        "depend on it.",
    )
    if not is_arrays:
        return source.__getitem__
    return lambda indices: jax.tree.map(lambda x: np.asarray(x)[indices], source)


def load_batch(
    load: Load, indices: np.ndarray, batch_size: int
) -> tuple[PyTree, np.ndarray]:
    """Loads a batch padded with zeros; returns it with `is_padding_example`."""
    padded = pad_indices(indices, batch_size)

    def pad(x):
        x = np.asarray(x)
        # The message shows neither number: the number of examples is sensitive.
        if x.ndim == 0 or len(x) != len(indices):
            raise ValueError(
                "the source must return one row for each index; got another number. "
                "See dpmp.training.Source."
            )
        return np.pad(x, [(0, len(padded) - len(x))] + [(0, 0)] * (x.ndim - 1))

    batch = jax.tree.map(pad, load(indices))
    return batch, padded < 0
