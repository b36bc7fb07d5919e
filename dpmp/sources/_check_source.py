"""Goes over all records of a dataset before a run, and names a defective one."""

import jax
import numpy as np

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.sources._source import Load, Loader, Source, loader_of

_TOGETHER = 64  # records


def check_source(source: PyTree | Source) -> None:
    """Loads every record of a dataset once, in order, and names the first bad one.

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
        has another tree, shape or dtype than the first one; and for one that depends on
        the others that are loaded with it. The message has the index,
        dtype and shape of the record, and the error of the source is attached. All of
        them are private data: call this where only people who may see the dataset see
        its output.
    """
    loader = loader_of(source, None)
    if loader.is_arrays:
        return  # they have been checked as a whole

    def alone(indices: np.ndarray) -> PyTree:
        return Loader(lambda i: loader.ask(i + int(indices[0])), 1).rows(np.arange(1))

    first = np.arange(min(2, loader.num_examples))
    _check_records(alone, len(first))  # the first two decide how to load all records
    loader.rows(first)
    load = loader.way[0]
    _check_records(load, loader.num_examples)
    if load == loader.ask:
        _check_groups(load, loader.num_examples)


def _check_groups(load: Load, num_records: int) -> None:
    """Compares records that are loaded together with the same ones alone."""
    for start in range(0, num_records, _TOGETHER):
        records = np.arange(start, min(start + _TOGETHER, num_records))
        together = jax.tree.leaves(load(records))
        for i, record in enumerate(records):
            alone = jax.tree.leaves(load(records[i : i + 1]))
            if not all(
                x[i : i + 1].tobytes() == y.tobytes()
                for x, y in zip(together, alone, strict=True)
            ):
                _validate.fail(
                    "every record must be the same whatever is loaded with it. "
                    "Compute nothing across records in __getitem__, or let it take "
                    "one index.",
                    record=int(record),
                )


def _check_records(load: Load, num_records: int) -> None:
    expected: dict[str, str] = {}
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
            if columns.get(path) != expected.get(path):
                _validate.fail(
                    "every record must have the tree, shapes and dtypes of the first "
                    "one. Pad or convert it, or leave it out of the dataset.",
                    record=record,
                    column=path or "(the dataset itself)",
                    in_the_first=expected.get(path, "nothing"),
                    in_this=columns.get(path, "nothing"),
                )
