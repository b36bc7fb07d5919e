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
    Face). Examples 0 and 1 decide which kind it is.

    Guarantees:
      - If a record cannot be loaded, the step is not made, and no smaller batch takes
        its place. The error names its type and the line of the source, and neither the
        record nor the message of the source. But the error itself reveals that a
        defective record is in the batch of this step. To avoid this, call
        `dpmp.check_source` before the run.
      - The index of an example decides its place in the dataset. Return the same
        example for the same index in every step.
    """

    def __getitem__(self, indices: np.ndarray, /) -> PyTree:
        """The examples at (k,) int64 indices, as arrays (k, ...)."""
        ...

    def __len__(self) -> int:
        """The number of examples; sampling and accounting depend on it."""
        ...


# By the letters of NumPy. A dtype's name would show the length of the longest text.
_NO_NUMBERS = {"O": "objects", "U": "text", "S": "bytes", "M": "dates", "m": "times"}

Load: TypeAlias = Callable[[np.ndarray], PyTree]


_FIND_IT = (
    "dpmp.check_source(source) goes over all records in order, which says nothing "
    "about batches, and names the one that fails."
)


def loader_of(
    source: PyTree | Source, num_examples: int | None, *, hides_errors: bool = True
) -> Load:
    """Checks a dataset; returns the function that loads the examples at indices.

    The dataset may have any size if `num_examples` is None. If `hides_errors`, an
    exception of the source is replaced by another one, which does not say which record
    it was about.
    """
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
    if num_examples is None:
        wanted, is_right = "its examples", len(sizes) == 1 and sizes != {()}
    else:
        wanted = f"the {num_examples} examples of the mechanism"
        is_right = sizes == {(num_examples,)}
    _validate.require(
        is_right,
        f"the dataset must hold {wanted}, one in each row of each array",
        sizes=sorted(size[0] if size else 0 for size in sizes),
        fix="Build the mechanism with num_examples=len(data): sampling and accounting "
        "depend on it.",
    )
    if is_arrays:
        columns = as_arrays(source)
        return lambda indices: jax.tree.map(lambda x: x[indices], columns)
    return Loader(source, hides_errors=hides_errors)


class Loader:
    """Asks a source for all examples of a batch at once, or for one after the other.

    A data set of single examples may accept an array of indices by accident, and mix
    the examples up. So the examples 0 and 1 decide, for the whole run: a source that
    also accepts single integers must give bit for bit the same examples for an array.
    These two say nothing about any batch.
    """

    def __init__(self, source: Any, *, hides_errors: bool):
        self._source = source
        self._hides_errors = hides_errors
        self._load: Load | None = None  # not known before the first batch
        self._no_rows: PyTree = None

    def __len__(self) -> int:
        return len(self._source)

    def __call__(self, indices: np.ndarray) -> PyTree:
        if self._load is None:
            self._load, rows = self._decide(np.arange(min(2, len(self._source))))
            self._no_rows = jax.tree.map(lambda x: x[:0], rows)
        # Many data sets refuse an empty list of indices.
        return self._load(indices) if len(indices) else self._no_rows

    def _decide(self, first: np.ndarray) -> tuple[Load, PyTree]:
        singles = _attempt(lambda: self._one_by_one(first))
        together = _attempt(lambda: self._together(first))
        if together is not None and (singles is None or _agree(together, singles)):
            return self._together, together
        if singles is not None:
            return self._one_by_one, singles
        # Neither works. To try again raises the error.
        accepts_arrays = _attempt(lambda: self._source[first]) is not None
        load = self._together if accepts_arrays else self._one_by_one
        return load, load(first)

    def _together(self, indices: np.ndarray) -> PyTree:
        return as_arrays(self._ask(indices))

    def _one_by_one(self, indices: np.ndarray) -> PyTree:
        rows = [as_arrays(self._ask(int(i))) for i in indices]
        _validate.require(
            len({describe_example(row) for row in rows}) == 1,
            "all examples must have the same tree of arrays, with the same shapes and "
            "dtypes",
            source=type(self._source).__name__,
            fix=_FIND_IT,
        )
        return jax.tree.map(lambda *xs: np.stack(xs), *rows)

    def _ask(self, indices: Any) -> PyTree:
        if not self._hides_errors:
            return self._source[indices]
        try:
            return self._source[indices]
        except Exception as error:
            name, traceback = type(error).__name__, error.__traceback__
        # Raised here, the error does not carry the one that it stands for.
        raise RuntimeError(
            f"a record of the batch could not be loaded: the source raised {name}. Its "
            f"message is left out, because it might say which record it was. {_FIND_IT}"
        ).with_traceback(traceback)


def describe_example(example: PyTree) -> Any:
    """The tree, shapes and dtypes of one example, which are the same for all."""
    leaves, tree = jax.tree.flatten(example)
    return tree, tuple((x.shape, x.dtype) for x in leaves)


def _attempt(load: Callable[[], PyTree]) -> PyTree:
    """What `load` returns, or None. Data sets refuse indices with all kinds of errors.

    Where this hides another error, the next attempt shows it.
    """
    try:
        return load()
    except Exception:
        return None


def _agree(together: PyTree, singles: PyTree) -> bool:
    """Whether a source gives the same for an array of indices as for each of them."""
    if _are_equal(together, singles):
        return True
    # Some sources take an integer for an array of one.
    is_batch_of_one = all(x.shape[1:2] == (1,) for x in jax.tree.leaves(singles))
    return is_batch_of_one and _are_equal(
        together, jax.tree.map(lambda x: x[:, 0], singles)
    )


def _are_equal(a: PyTree, b: PyTree) -> bool:
    is_same = describe_example(a) == describe_example(b)
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=False)
    return is_same and all(np.array_equal(x, y, equal_nan=True) for x, y in pairs)


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
      ValueError: for text and other objects, or if there are no arrays. The message
        names the path, and shows nothing of the data.
    """
    _validate.require(
        bool(jax.tree.leaves(tree, is_leaf=_is_list_of_numbers)),
        "every example must have at least one array",
        type=type(tree).__name__,
        fix="A filter of grain leaves None in place of an example: remove such "
        "examples before the run, since num_examples would count them.",
    )

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
