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
    describe_example,
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
        and the error of the source is attached. Both are private data: call this where
        only people who may see the dataset see its output.
    """
    load = loader_of(source, None, hides_errors=False)
    if not isinstance(load, Loader):
        return  # arrays have been checked as a whole
    first = np.arange(min(2, len(load)))
    for record in first.tolist():
        _load_record(lambda record=record: _in_any_way(source, record), record)
    expected = _describe_rows(load(first))
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


def _describe_rows(rows: PyTree) -> Any:
    return describe_example(jax.tree.map(lambda x: x[0], rows))


def _is_intact(load: Load, block: np.ndarray, expected: Any) -> bool:
    try:
        rows = load(block)
    except Exception:
        return False
    has_all = all(len(x) == len(block) for x in jax.tree.leaves(rows))
    return has_all and _describe_rows(rows) == expected


def _name_the_first(load: Load, block: np.ndarray, expected: Any) -> None:
    for record in block.tolist():
        rows = _load_record(lambda record=record: load(np.array([record])), record)
        _validate.require(
            _describe_rows(rows) == expected,
            "every record must have the tree, shapes and dtypes of the first one",
            record=record,
            fix="Convert it, or leave it out of the dataset.",
        )
    _validate.fail(
        "records that load one by one must also load together, one row for each",
        first=int(block[0]),
        last=int(block[-1]),
        fix="See dpmp.Source.",
    )


def _load_record(load: Callable[[], PyTree], record: int) -> PyTree:
    try:
        return load()
    except Exception as error:
        message = (
            f"every record must load; got record={record}. Repair it, or leave it "
            "out of the dataset: the error above says what is wrong."
        )
        raise ValueError(message) from error
