"""Loads a batch on the host: turns a dataset and indices into padded arrays."""

import contextlib
import functools
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np

from dpmp import _validate
from dpmp._arrays import as_array, check_keys, without_debugging
from dpmp._typing import PyTree

Load: TypeAlias = Callable[[Any], PyTree]  # from indices to NumPy arrays

_FIND_IT = "dpmp.check_source(source) loads all records in order, and names a bad one."
_NOT_ALIKE = (
    "the source must return one row for each index, and all examples must be numbers "
    "with the same tree, shapes and dtypes; got others. A dataset that filters its "
    f"rows must be filtered before, to arrays. See dpmp.Source. {_FIND_IT}"
)


class Source(Protocol):
    """A dataset that returns all examples of a batch at once.

    All batches must have the same tree of arrays, with the same dtypes and, except for
    the number of examples, the same shapes: pad sequences to one length. Another shape
    would need another compiled program, and the time to compile it would reveal
    something about the batch.

    A source whose `__getitem__` takes a single integer and returns one example works
    too (grain, PyTorch): it is asked for one example after the other, so that none can
    depend on the rest of its batch, as the guarantee assumes. If yours takes both, and
    arrays are faster, let it raise TypeError for an integer. (Datasets of Hugging Face
    without functions on the fly are asked for arrays.) A source may also return
    lists in place of arrays.

    The index of an example decides its place in the dataset: return the same example
    for the same index in every step.

    Guarantees:
      If a record cannot be loaded, the step is not made, and no smaller batch takes its
      place. The error shows its type and the line that raised it, but neither the
      record nor the message of the source. The error itself reveals that a defective
      record is in the batch: call `dpmp.check_source` before the run to avoid it.
    """

    def __getitem__(self, indices: np.ndarray, /) -> PyTree:
        """The examples at (k,) int64 indices, as arrays (k, ...)."""
        ...

    def __len__(self) -> int:
        """The number of examples; sampling and accounting depend on it."""
        ...


def loader_of(
    source: Any, num_examples: int | None, *, hides_size: bool = False
) -> "Loader":
    """Checks a dataset, of any size if `num_examples` is None; returns its loader.

    No message shows the number of examples if it is private.
    """
    if hasattr(source, "iloc") and hasattr(source, "columns"):  # a table of pandas
        source = {name: source[name] for name in source.columns}
    is_iterator = hasattr(source, "__next__") and not hasattr(source, "__getitem__")
    if is_iterator or type(source) in (str, bytes, type):
        _validate.fail(
            "the dataset must be arrays, or an object with __getitem__ and __len__",
            dataset=type(source).__name__,
            fix=_in_place_of(source),
        )
    check_keys("the dataset", source)
    leaves = jax.tree.leaves(source, is_leaf=_is_leaf)
    is_arrays = bool(leaves) and not _is_list_of_numbers(source)
    is_arrays &= all(isinstance(x, list) or _is_array(x) for x in leaves)
    is_sequence = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    if not is_arrays and (
        not is_sequence or isinstance(source, list | tuple | Mapping)
    ):
        _validate.fail(
            "the dataset must be arrays with one row for each example, or an object "
            "with __getitem__ and __len__",
            dataset=type(source).__name__,
            fix=f"{_in_place_of(source)} For anything else see dpmp.Source.",
        )
    columns = as_arrays(source) if is_arrays else None
    sizes = {len(x) if x.ndim else 0 for x in jax.tree.leaves(columns)} or {len(source)}
    num_examples = max(*sizes, 1) if num_examples is None else num_examples
    number = "" if hides_size else f"{num_examples} "
    fix = "Set num_examples to the number of examples of this dataset, which must hold "
    fix += "each of them once: neither repeated nor in batches."
    if len(sizes) > 1:
        fix = "Make all arrays equally long, or read parts of one array through one "
        fix += "source (Shards in docs/data.md)."
    if sizes != {num_examples}:
        _validate.fail(
            f"the dataset must hold the {number}examples, one in each row of each "
            "array",
            sizes="other ones" if hides_size else sorted(sizes),
            fix=_in_place_of(source) if isinstance(source, list | tuple) else fix,
        )
    # An endless dataset of grain has this size. By it, noise would be far too small.
    if num_examples >= sys.maxsize:
        _validate.fail(
            "the dataset must hold each example once. Leave out repeat(): dpmp draws "
            "the examples of every step from the whole dataset.",
            size=num_examples,
        )

    def ask(indices: Any) -> PyTree:
        with without_debugging():  # a source may compute with jax
            if columns is None:
                return as_arrays(source[indices])
            return jax.tree.map(lambda x: x[indices], columns)

    return Loader(ask, num_examples, columns is not None, _has_columns(source))


def _has_columns(source: Any) -> bool:
    """Whether it is a dataset of Hugging Face without functions on the fly."""
    is_known = type(source).__module__ == "datasets.arrow_dataset"
    return is_known and source.format["type"] != "custom"


def _in_place_of(source: Any) -> str:
    """Says what to pass in place of something that is not a dataset."""
    if isinstance(source, str | bytes | os.PathLike):
        return "Load the file: pandas.read_csv, or np.load(path, mmap_mode='r')."
    if isinstance(source, list | tuple):
        return 'Stack a list of examples: {"x": np.stack([row["x"] for row in rows])}.'
    if isinstance(source, Mapping):
        return (
            'Of a dict of datasets, pass one: data["train"]. Convert columns to arrays '
            "by np.asarray, or read them in the __getitem__ of one object (Rows in "
            "docs/data.md)."
        )
    return (
        "In place of a loader, sampler or iterator, pass the dataset that it reads "
        "(in PyTorch, loader.dataset). dpmp draws the batches itself, as the "
        "accountant assumes."
    )


class Loader:
    """Asks a source for all examples of a batch at once, or for one after the other.

    Examples 0 and 1 decide this for the whole run, so the choice reveals nothing about
    a batch. A source of single examples may accept an array of indices by accident, and
    mix the examples up. So arrays are for sources that do not take an integer.
    """

    def __init__(
        self,
        ask: Load,
        num_examples: int,
        is_arrays: bool = False,
        has_columns: bool = False,
    ):
        self.ask, self.num_examples, self.is_arrays = ask, num_examples, is_arrays
        self._has_columns = has_columns
        self._is_x64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64

    def __call__(self, indices: np.ndarray) -> PyTree:
        """The rows in the dtypes that jax uses. Errors show nothing of the batch."""

        def cast(x: np.ndarray) -> np.ndarray:
            return x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)

        # The thread that loads ahead does not inherit this setting of jax.
        with jax.enable_x64(self._is_x64):
            return _hide_errors(lambda: jax.tree.map(cast, self.rows(indices)))

    def rows(self, indices: np.ndarray) -> PyTree:
        """The rows as the source has them. Errors show everything."""
        load, first = self.way
        size = len(indices)
        wanted = jax.tree.map(lambda x: np.empty((size, *x.shape[1:]), x.dtype), first)
        rows = load(indices) if size else wanted  # many sources refuse an empty list
        if _described(rows) != _described(wanted):
            raise _validate.RefusedError(_NOT_ALIKE)
        return rows

    @functools.cached_property
    def way(self) -> tuple[Load, PyTree]:
        """The function that loads all batches, and examples 0 and 1."""
        first = np.arange(min(2, self.num_examples))
        if self.is_arrays:
            return self.ask, self.ask(first)
        try:
            singles = self.one_by_one(first)
        except Exception as error:
            try:
                return self.ask, self.ask(first)
            except Exception as other:  # the traceback has both
                takes_arrays = isinstance(error, TypeError)
                raise (other if takes_arrays else error) from None
        with contextlib.suppress(Exception):
            rows = self.ask(first)
            like_singles = rows
            if not self._has_columns:  # it may take an integer for an array of one
                like_singles = jax.tree.map(lambda x: x[:, None], rows)
            if _content(like_singles) == _content(singles):
                return self.ask, rows
        return self.one_by_one, singles

    def one_by_one(self, indices: np.ndarray) -> PyTree:
        """The rows as the source has them, from one call for each index."""
        # Copies, because a source may return one buffer for all of its rows.
        rows = [jax.tree.map(np.array, self.ask(int(i))) for i in indices]
        if any(_described(row) != _described(rows[0]) for row in rows):
            raise _validate.RefusedError(_NOT_ALIKE)
        return jax.tree.map(lambda *xs: np.stack(xs), *rows)


def _hide_errors(load: Callable[[], PyTree]) -> PyTree:
    """Calls `load`; an error becomes one whose message shows nothing of a batch."""
    try:
        # NumPy would warn of an overflow, which shows that the value is in the batch.
        with np.errstate(all="ignore"):
            return load()
    except BaseException as error:
        caught = error
    # Here the error is no longer being handled, so that no other one carries it along.
    try:
        hidden = _without_message(caught)
    except BaseException as late:  # Ctrl-C, which tells where it came
        hidden = SystemExit(1) if isinstance(late, SystemExit) else KeyboardInterrupt()
    del caught
    raise hidden


def _without_message(error: BaseException) -> BaseException:
    """An error that names the type and the place of another one."""
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        # The source may raise it, or add notes to it, and reveal a record thereby.
        is_signal = hasattr(error, "is_signal")
        status = error.args[0] if is_signal and error.args else 1
        hidden = SystemExit(status if isinstance(status, int) else 1)
        for kind in (KeyboardInterrupt, GeneratorExit):
            hidden = kind() if isinstance(error, kind) else hidden
        if is_signal:
            hidden.is_signal = True  # pyright: ignore[reportAttributeAccessIssue]
        return hidden
    if isinstance(error, _validate.RefusedError):
        return _validate.RefusedError(_NOT_ALIKE)
    line = traceback.extract_tb(error.__traceback__)[-1]
    return RuntimeError(
        "a record of the batch could not be loaded: the source raised "
        f"{type(error).__name__} in {line.filename}, line {line.lineno} "
        f"({line.line}). Its message is not shown, because it may name the record. "
        f"{_FIND_IT}"
    )


def _described(examples: PyTree) -> Any:
    leaves, tree = jax.tree.flatten(examples)
    return tree, [(x.shape, x.dtype) for x in leaves]


def _content(examples: PyTree) -> Any:
    return _described(examples), [x.tobytes() for x in jax.tree.leaves(examples)]


def load_padded(load: Load, padded: np.ndarray) -> PyTree:
    """Loads the rows of padded indices; those of padding, -1, are zeros."""
    is_example = padded >= 0
    rows = load(_hide_errors(lambda: padded[is_example]))

    def pad(x: np.ndarray) -> np.ndarray:
        padded_rows = np.zeros((len(padded), *x.shape[1:]), x.dtype)
        padded_rows[is_example] = x
        return padded_rows

    return _hide_errors(lambda: jax.tree.map(pad, rows))


def as_arrays(tree: PyTree) -> PyTree:
    """Turns the leaves into NumPy arrays; a list of numbers is one leaf."""
    check_keys("an example", tree)
    columns, structure = jax.tree_util.tree_flatten_with_path(tree, _is_leaf)
    return structure.unflatten([as_array(*x) for x in columns or [((), None)]])


def _is_list_of_numbers(x: Any) -> bool:
    """Whether a list stands for an array, and not for a tree of arrays."""
    return isinstance(x, list) and not any(
        getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(x)
    )


def _is_leaf(x: Any) -> bool:
    # A sparse matrix of jax is a tree of arrays, whose rows are not its rows.
    return _is_list_of_numbers(x) or hasattr(x, "todense")


def _is_array(x: Any) -> bool:  # a Hugging Face dataset has a shape alone
    return hasattr(x, "shape") and (hasattr(x, "dtype") or hasattr(x, "__array__"))
