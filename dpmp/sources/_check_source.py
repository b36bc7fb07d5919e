"""Goes over all records of a dataset before a run, and names a defective one."""

import collections

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp._warnings import warn
from dpmp.sources._source import Load, Loader, Source, loader_of

_AT_ONCE = 4096  # rows of arrays


def check_source(source: PyTree | Source) -> None:
    """Loads every record of a dataset once, in order, and names the first bad one.

    Warns of columns with NaN or infinity, in which a gradient hardly ever is finite.

    Call this before a run, or after `fit` reported that a record could not be loaded.
    That report does not name the record, because the batches are secret.

    >>> class Photos:
    ...     def __len__(self):
    ...         return 1000
    ...     def __getitem__(self, index):
    ...         if index == 700:
    ...             raise OSError("the file is truncated")
    ...         return np.zeros(3)
    >>> try:
    ...     check_source(Photos())
    ... except ValueError as error:
    ...     print(str(error).partition(".")[0])
    every record must load; got record=700

    Args:
      source: arrays with one row for each example, or a `Source`, as in
        `DPTrainer.fit`.

    Raises:
      ValueError: for the first record that does not load, is not made of numbers, or
        has another tree, shape or dtype than the first one. The message has the index,
        dtype and shape of the record, and the error of the source is attached. All of
        them, and the numbers of a warning, are private data: call this where only
        people who may see the dataset see its output.
    """
    loader = loader_of(source, None)
    not_finite: collections.Counter[str] = collections.Counter()
    if loader.is_arrays:  # they have been checked as a whole
        for start in range(0, loader.num_examples, _AT_ONCE):
            stop = min(start + _AT_ONCE, loader.num_examples)
            not_finite += _count_not_finite(loader.rows(np.arange(start, stop)))
        _warn_of_columns(not_finite, loader.num_examples)
        return

    def alone(indices: np.ndarray) -> PyTree:
        return Loader(lambda i: loader.ask(i + int(indices[0])), 1).rows(np.arange(1))

    first = np.arange(min(2, loader.num_examples))
    _check_records(alone, len(first))  # the first two decide how to load all records
    loader.rows(first)
    not_finite = _check_records(loader.way[0], loader.num_examples)
    _warn_of_columns(not_finite, loader.num_examples)


def _check_records(load: Load, num_records: int) -> collections.Counter[str]:
    """Returns how many records have NaN or infinity in a column."""
    expected: dict[str, str] = {}
    not_finite: collections.Counter[str] = collections.Counter()
    for record in range(num_records):
        try:
            rows = load(np.array([record]))
        except Exception as error:
            is_ours = isinstance(error, _validate.RefusedError)
            reason = error if is_ours else f"{type(error).__name__} (see above)"
            raise _validate.RefusedError(
                f"every record must load; got record={record}. Repair it, or leave it "
                f"out of the dataset. The reason: {reason}"
            ) from error
        leaves, tree = jax.tree_util.tree_flatten_with_path(rows)
        # The shapes begin with 1, the number of rows.
        columns = {jax.tree_util.keystr(p): f"{x.dtype}{[*x.shape]}" for p, x in leaves}
        columns["(the tree)"] = str(tree)
        expected = expected or columns
        for path in [*expected, *columns]:
            _validate.require(
                columns.get(path) == expected.get(path),
                "every record must have the tree, shapes and dtypes of the first one. "
                "Pad or convert it, or leave it out of the dataset.",
                record=record,
                column=path or "(the dataset itself)",
                in_the_first=expected.get(path, "nothing"),
                in_this=columns.get(path, "nothing"),
            )
        not_finite += _count_not_finite(rows)
    return not_finite


def _count_not_finite(rows: PyTree) -> collections.Counter[str]:
    found: collections.Counter[str] = collections.Counter()
    for path, x in jax.tree_util.tree_leaves_with_path(rows):
        if jnp.issubdtype(x.dtype, jnp.inexact):
            is_finite = np.isfinite(x).reshape(len(x), -1).all(axis=1)
            found[jax.tree_util.keystr(path)] += int(np.sum(~is_finite))
    return found


def _warn_of_columns(not_finite: collections.Counter[str], num_records: int) -> None:
    columns = [f"{n} in {path or 'the array'}" for path, n in not_finite.items() if n]
    if columns:
        warn(
            f"of {num_records} records, these have NaN or infinity: "
            f"{', '.join(columns)}. Unless the loss masks them, such records train "
            "nothing. Fill them, or leave them out."
        )
