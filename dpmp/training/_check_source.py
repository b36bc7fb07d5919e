"""Goes over all records of a dataset before a run, and names a defective one."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.training._source import (
    Load,
    Loader,
    Source,
    as_arrays,
    loader_of,
)

_BLOCK_SIZE = 256


def check_source(source: PyTree | Source) -> None:
    """Loads every record of a dataset once, in order, and names the first bad one.

    Call this before a run, or after `fit` reported that a record could not be loaded.
    That report does not name the record, because the batches are secret. This function
    draws no batches, so it may name it.

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
        them are private data: call this where only people who may see the dataset see
        its output.
    """
    load = loader_of(source, None, hides_errors=False)
    if not isinstance(load, Loader):
        return  # arrays have been checked as a whole
    first = np.arange(min(2, len(load)))
    for record in first.tolist():
        _load_record(lambda record=record: _in_any_way(source, record), record)
    rows = load(first)
    _check_length(rows, first)
    expected = _as_columns(rows)
    for start in range(0, len(load), _BLOCK_SIZE):
        block = np.arange(start, min(start + _BLOCK_SIZE, len(load)))
        if not _is_intact(load, block, expected):
            _name_the_first(load, block, expected)


def _in_any_way(source: Any, record: int) -> PyTree:
    try:
        return as_arrays(source[record])
    except Exception:
        # If this fails too, the traceback shows both errors.
        return as_arrays(source[np.array([record])])


def _as_columns(rows: PyTree) -> dict[str, str]:
    """The dtype and the shape of an example at each path, and the tree itself."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(rows)
    columns = {
        jax.tree_util.keystr(path): f"{x.dtype.name}{list(x.shape[1:])}"
        for path, x in leaves
    }
    return {**columns, "(the tree)": str(tree)}


def _is_intact(load: Load, block: np.ndarray, expected: dict[str, str]) -> bool:
    try:
        rows = load(block)
    except Exception:
        return False
    has_all = all(x.shape[:1] == block.shape for x in jax.tree.leaves(rows))
    return has_all and _as_columns(rows) == expected


def _name_the_first(load: Load, block: np.ndarray, expected: dict[str, str]) -> None:
    for record in block.tolist():
        rows = _load_record(lambda record=record: load(np.array([record])), record)
        _check_length(rows, block[:1] - block[0] + record)
        _check_columns(_as_columns(rows), expected, record)
    rows = load(block)  # if the source fails here, its own error says why
    _check_length(rows, block)
    columns = _as_columns(rows)
    column = _first_difference(columns, expected)
    _validate.fail(
        "records that load one by one must also load together, as the same arrays",
        first=int(block[0]),
        last=int(block[-1]),
        column=column or "(the dataset itself)",
        one_by_one=expected.get(str(column), "nothing"),
        together=columns.get(str(column), "nothing"),
        fix="Pad all records to one size. See dpmp.Source.",
    )


def _check_length(rows: PyTree, indices: np.ndarray) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(rows):
        _validate.require(
            x.shape[:1] == indices.shape,
            "the source must return one row for each index, in all arrays",
            first=int(indices[0]),
            last=int(indices[-1]),
            column=jax.tree_util.keystr(path) or "(the dataset itself)",
            shape=x.shape,
            fix=f"For {len(indices)} indices, the shape must begin with "
            f"{len(indices)}. See dpmp.Source.",
        )


def _check_columns(
    columns: dict[str, str], expected: dict[str, str], record: int
) -> None:
    column = _first_difference(columns, expected)
    _validate.require(
        column is None,
        "every record must have the tree, shapes and dtypes of the first one",
        record=record,
        column=column or "(the dataset itself)",
        in_the_first=expected.get(str(column), "nothing"),
        in_this=columns.get(str(column), "nothing"),
        fix="Pad or convert it, or leave it out of the dataset.",
    )


def _first_difference(columns: dict[str, str], expected: dict[str, str]) -> str | None:
    paths = [*expected, *columns]
    return next((x for x in paths if columns.get(x) != expected.get(x)), None)


def _load_record(load: Callable[[], PyTree], record: int) -> PyTree:
    try:
        return load()
    except Exception as error:
        is_ours = isinstance(error, _validate.RefusedError)
        reason = str(error) if is_ours else f"{type(error).__name__} (see above)."
        message = (
            f"every record must load; got record={record}. Repair it, or leave it out "
            f"of the dataset. The reason: {reason}"
        )
        raise _validate.RefusedError(message) from error
