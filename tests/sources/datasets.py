"""Datasets of twelve examples, which give single examples, batches or defects."""

import jax
import numpy as np

from dpmp.batch_selection import pad_indices
from dpmp.sources._source import load_padded, loader_of

ARRAYS = {
    "x": np.arange(1, 25, dtype=np.float32).reshape(12, 2),
    "label": np.arange(1, 13),
}


class Sized:
    """Gives the rows of any index."""

    def __len__(self):
        return 12

    def __getitem__(self, indices):
        return {name: x[indices] for name, x in ARRAYS.items()}


class Singles(Sized):
    """Gives one example for one integer, as grain and PyTorch do.

    A record may be what a function makes of it. The function may raise an error.
    """

    def __init__(self, change=None, record=7):
        self.change, self.record, self.asked = change, record, []

    def __getitem__(self, index):
        self.asked.append(index)
        if not isinstance(index, int):
            raise TypeError("one integer, please")
        example = super().__getitem__(index)
        return self.change(example) if self.change and index == self.record else example


class Batches(Singles):
    """Gives all examples at an array of indices, and changes those with the record."""

    def __getitem__(self, indices):
        self.asked.append(indices)
        if isinstance(indices, int):
            raise TypeError("an array, please")
        batch = Sized.__getitem__(self, indices)
        return self.change(batch) if self.change and self.record in indices else batch


class Lazy:
    """A row that is read when it becomes an array, as images of PIL are."""

    def __init__(self, error):
        self.error = error

    def __array__(self, dtype=None, copy=None):
        raise self.error


def load_batch(load, indices, size=12):
    return load_padded(load, pad_indices(np.array(indices, int), size))


def assert_gives_examples_and_zeros(source, arrays=ARRAYS):
    """Checks batches of several sizes against the arrays, which have the same tree."""
    load = loader_of(source, 12)
    for indices in ([], [0], [3, 5, 11], [*range(12)]):
        batch = load_batch(load, indices)
        assert jax.tree.structure(batch) == jax.tree.structure(arrays)
        for column, x in zip(*map(jax.tree.leaves, (batch, arrays)), strict=True):
            assert column.shape == x.shape
            expected = x[np.array(indices, int)]
            np.testing.assert_array_equal(column[: len(indices)], expected)
            assert not column[len(indices) :].any()
