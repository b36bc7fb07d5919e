"""Loads a batch on the host: turns a dataset and indices into padded arrays."""

import contextlib
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

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

    A source whose `__getitem__` takes a single integer and returns one example works
    too (grain, PyTorch). So does one that returns lists in place of arrays (Hugging
    Face).
    """

    def __getitem__(self, indices: np.ndarray, /) -> PyTree:
        """The examples at (k,) int64 indices, as arrays (k, ...); k may be 0."""
        ...

    def __len__(self) -> int:
        """The number of examples; sampling and accounting depend on it."""
        ...


# By the letters of NumPy. A dtype's name would show the length of the longest text.
_NO_NUMBERS = {"O": "objects", "U": "text", "S": "bytes", "M": "dates", "m": "times"}

Load: TypeAlias = Callable[[np.ndarray], PyTree]


def loader_of(source: PyTree | Source, num_examples: int) -> Load:
    """Checks a dataset; returns the function that loads the examples at indices."""
    source = _as_columns(source)
    leaves = jax.tree.leaves(source)
    is_arrays = bool(leaves) and all(hasattr(x, "shape") for x in leaves)
    has_interface = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    _validate.require(
        is_arrays or (has_interface and not isinstance(source, list | tuple | dict)),
        "the dataset must be arrays with one row for each example, or an object with "
        "__getitem__ and __len__",
        dataset=type(source).__name__,
        fix='Stack a list of examples: {"x": np.stack([row["x"] for row in rows])}. '
        "For anything else see dpmp.Source.",
    )
    sizes = {np.shape(x)[:1] for x in leaves} if is_arrays else {(len(source),)}
    _validate.require(
        sizes == {(num_examples,)},
        f"the dataset must hold the {num_examples} examples of the mechanism, one in "
        "each row of each array",
        sizes=sorted(size[0] if size else 0 for size in sizes),
        fix="Build the mechanism with num_examples=len(data): sampling and accounting "
        "depend on it.",
    )
    if is_arrays:
        columns = as_arrays(source)
        return lambda indices: jax.tree.map(lambda x: x[indices], columns)
    return _Loader(source)


class _Loader:
    """Asks a source for all examples of a batch, or else for one after the other.

    The first batch decides which, for the whole run.
    """

    def __init__(self, source: Any):
        self._source = source
        self._one_by_one: bool | None = None  # not known before the first batch

    def __call__(self, indices: np.ndarray) -> PyTree:
        if not self._one_by_one:
            try:
                rows = self._source[indices]
            except Exception:
                # Datasets refuse an array of indices with all kinds of errors. If this
                # was another error, to ask for single examples raises it again.
                if self._one_by_one is not None:
                    raise
            else:
                self._one_by_one = False
                if len(indices) == 0 and _has_lists(rows):
                    # Empty lists do not show the shape of an example.
                    first = as_arrays(self._source[np.zeros(1, np.int64)])
                    return jax.tree.map(lambda x: x[:0], first)
                return as_arrays(rows)
        rows = self._stacked(indices)
        self._one_by_one = True
        return rows

    def _stacked(self, indices: np.ndarray) -> PyTree:
        chosen = [int(i) for i in indices] or [0]
        rows = [as_arrays(self._source[i]) for i in chosen]
        return jax.tree.map(lambda *xs: np.stack(xs)[: len(indices)], *rows)


def load_batch(
    load: Load, indices: np.ndarray, batch_size: int
) -> tuple[PyTree, np.ndarray]:
    """Loads a batch padded with zeros; returns it with `is_padding_example`."""
    padded = pad_indices(indices, batch_size)
    rows = load(indices)

    def pad(x: np.ndarray) -> np.ndarray:
        # The message shows neither number: the number of examples is sensitive.
        if x.ndim == 0 or len(x) != len(indices):
            raise _validate.RefusedError(
                "the source must return one row for each index; got another number. "
                "See dpmp.Source."
            )
        return np.pad(x, [(0, batch_size - len(x))] + [(0, 0)] * (x.ndim - 1))

    return jax.tree.map(pad, rows), padded < 0


def as_arrays(tree: PyTree) -> PyTree:
    """Turns the leaves into NumPy arrays; a list of numbers is one leaf.

    Raises:
      ValueError: for text and other objects. The message names the path, and shows
        nothing of the data.
    """

    def convert(path: Any, x: Any) -> np.ndarray:
        array, content = np.zeros(0), "lists of different lengths"
        # The message of NumPy would show the shape of an example.
        with contextlib.suppress(ValueError):
            array = np.asarray(x)
            content = _NO_NUMBERS.get(array.dtype.kind)
        _validate.require(
            content is None,
            "examples must be numbers",
            column=jax.tree_util.keystr(path) or "(the dataset itself)",
            content=content,
            fix="Turn text into token numbers, and pad lists of different lengths to "
            "one length.",
        )
        return array

    return jax.tree_util.tree_map_with_path(convert, tree, is_leaf=_is_list_of_numbers)


def _is_list_of_numbers(x: Any) -> bool:
    """Whether a list stands for an array, and not for a tree of arrays."""
    return isinstance(x, list) and not any(
        hasattr(leaf, "shape") and np.ndim(leaf) for leaf in jax.tree.leaves(x)
    )


def _as_columns(source: Any) -> Any:
    """Turns a table of pandas, or a dict of lists, into a dict of arrays."""
    if hasattr(source, "iloc"):
        if not hasattr(source, "columns"):
            return source.to_numpy()
        return {name: source[name].to_numpy() for name in source.columns}
    is_columns = isinstance(source, dict) and bool(source)
    if is_columns and all(isinstance(x, list) for x in source.values()):
        return as_arrays(source)
    return source


def _has_lists(tree: PyTree) -> bool:
    return any(
        map(_is_list_of_numbers, jax.tree.leaves(tree, is_leaf=_is_list_of_numbers))
    )
