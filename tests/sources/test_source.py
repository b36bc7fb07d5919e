import collections
import io
import traceback
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sources.datasets import (
    ARRAYS,
    Batches,
    Lazy,
    Singles,
    Sized,
    assert_gives_examples_and_zeros,
    load_batch,
)

from dpmp._arrays import as_device_dtypes
from dpmp.sources._source import loader_of


class AsBatchOfOne(Sized):
    """Takes an integer for an array of one."""

    def __getitem__(self, indices):
        return super().__getitem__(np.atleast_1d(indices))


class Lists(Sized):
    """Gives lists, as datasets of Hugging Face do."""

    def __getitem__(self, indices):
        return {name: x.tolist() for name, x in super().__getitem__(indices).items()}


class OneBuffer(Singles):
    """Gives all rows in one array, which it overwrites."""

    buffer = np.empty(2, np.float32)

    def __getitem__(self, index):
        row = super().__getitem__(index)
        np.copyto(self.buffer, row["x"])
        return {**row, "x": self.buffer}


DATASETS = {
    "arrays": lambda: ARRAYS,
    "one by one": Singles,
    "one buffer": OneBuffer,
    "batch of one": AsBatchOfOne,
    "lists": Lists,
    "dict of lists": lambda: {name: x.tolist() for name, x in ARRAYS.items()},
    "arrays and lists": lambda: {**ARRAYS, "label": ARRAYS["label"].tolist()},
}


@pytest.mark.parametrize("name", DATASETS)
def test_datasets_as_people_have_them_give_their_examples_and_zeros(name):
    assert_gives_examples_and_zeros(DATASETS[name]())


def test_nested_trees_with_masks_and_labels_keep_their_shape_and_dtypes():
    nested = {
        "text": {"tokens": np.ones((12, 4), np.int32), "mask": np.ones((12, 4), bool)},
        "targets": (np.arange(12), np.ones((12, 2, 2), np.float16)),
    }

    class Nested(Sized):
        def __getitem__(self, indices):
            return jax.tree.map(lambda x: x[indices], nested)

    for source in (nested, Nested()):
        batch = load_batch(loader_of(source, 12), [2, 9], 3)
        assert jax.tree.structure(batch) == jax.tree.structure(nested)
        for x, column in zip(*map(jax.tree.leaves, (batch, nested)), strict=True):
            assert x.dtype == jax.dtypes.canonicalize_dtype(column.dtype)
            np.testing.assert_array_equal(x[:2], column[[2, 9]])
            assert not x[2:].any()


def test_mapped_files_are_not_read_as_a_whole(tmp_path):
    expected = np.arange(24.0).reshape(12, 2)
    np.save(tmp_path / "x.npy", expected)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    load = loader_of({"x": mapped, "mask": np.ones(12, bool)}, 12)
    assert np.shares_memory(load.ask(slice(None))["x"], mapped)
    np.testing.assert_array_equal(load(np.array([2, 9]))["x"], expected[[2, 9]])


# How a source is asked.


def test_a_source_of_single_examples_is_asked_for_the_sampled_ones_alone():
    source = Singles()
    load = loader_of(source, 12)
    for indices in ([3, 5], [], [7]):
        load(np.array(indices, int))
    # The first two records show what kind of source it is.
    assert [x for x in source.asked if isinstance(x, int)] == [0, 1, 3, 5, 7]
    assert not any(len(np.atleast_1d(x)) == 0 for x in source.asked)


def test_a_source_that_takes_one_index_is_never_given_more():
    class Clipped(Sized):
        """Mixes the examples of an array, but not those of the first two."""

        def __getitem__(self, index):
            x = ARRAYS["x"][index]
            return x / max(1.0, abs(x[..., :1]).max() / 6)

    batch = loader_of(Clipped(), 12)(np.array([1, 11]))
    np.testing.assert_array_equal(batch[0], ARRAYS["x"][1])
    assert np.any(batch[1] != ARRAYS["x"][11])


def test_a_batch_of_one_that_depends_on_others_is_not_taken_for_rows():
    class Mixed(AsBatchOfOne):
        def __getitem__(self, indices):
            x = super().__getitem__(indices)["x"]
            return x - x.mean()

    load = loader_of(Mixed(), 12)
    assert load.way[0] == load.one_by_one
    load = loader_of(AsBatchOfOne(), 12)
    assert load.way[0] == load.ask


def test_one_example_is_not_taken_for_rows_of_the_same_bytes():
    class Blank:
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return np.zeros(3)

    assert loader_of(Blank(), 1)(np.array([0])).shape == (1, 3)


# What is refused.


class Indexable:
    __getitem__ = Sized.__getitem__


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"x": np.zeros((11, 3)), "label": np.zeros(11)}, "must hold the 12 examples"),
        ({"x": np.zeros((12, 3)), "label": np.zeros(13)}, "must hold the 12 examples"),
        ({"x": np.zeros((12, 3)), "label": np.zeros(())}, "must hold the 12 examples"),
        (collections.UserList(range(13)), "must hold the 12 examples"),
        *((x, "and __len__; got data") for x in (io.StringIO(), Indexable(), [1], {})),
        (None, "and __len__; got data"),
    ],
)
def test_something_else_than_a_dataset_of_the_examples_is_refused(source, message):
    with pytest.raises(ValueError, match=message):
        loader_of(source, 12)


# The source must return one row for each index, all alike, of numbers.
NOT_ALIKE = {
    "no rows": lambda: Batches(lambda _: np.float32(3.0)),
    "few rows": lambda: Batches(lambda rows: rows["x"][:1]),
    "many rows": lambda: Batches(lambda rows: rows["x"].repeat(2, 0)),
    "tree": lambda: Singles(lambda x: {"x": x["x"]}),
    "dtype": lambda: Singles(lambda x: {**x, "x": x["x"].astype(np.float64)}),
    "shape": lambda: Singles(lambda x: {**x, "x": x["x"][:1]}),
    "ragged": lambda: Singles(lambda _: {"x": [[1.0] * 8, [1.0] * 9]}, record=0),
    "text": lambda: Singles(lambda _: "z" * 56),
    "text at first": lambda: Singles(lambda _: "z" * 56, record=0),
    "nothing": lambda: Singles(lambda _: ()),
}


@pytest.mark.parametrize("name", NOT_ALIKE)
def test_examples_that_are_not_alike_are_refused_and_not_shown(name):
    source = NOT_ALIKE[name]()
    with pytest.raises(ValueError, match=r"one row for each.*check_source") as caught:
        loader_of(source, 12)(np.array([3, 7]))
    assert not any(letter.isdigit() for letter in str(caught.value))
    assert caught.value.__cause__ is caught.value.__context__ is None


def test_text_is_refused_without_its_length():
    texts = {"name": np.array(["a name of 21 letters"] * 12)}
    with pytest.raises(ValueError, match=r"column=.*'name'.*content='str_'") as e:
        loader_of(texts, 12)
    assert "20" not in str(e.value)
    assert "21" not in str(e.value)


# What would say something about the batch.


def hidden(load, indices, error, message, secret):
    """The exception of a batch that does not load. It must not show a secret."""
    with pytest.raises(error, match=message) as caught:
        load_batch(load, indices, 4)
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert not getattr(caught.value, "__notes__", [])
    # What a log may show of it, and of those that it was raised from.
    assert secret not in "".join(traceback.format_exception(caught.value))
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert not {"__getitem__", "__array__", "change"} & {x.name for x in frames}
    return caught.value


@pytest.mark.parametrize("kind", [Batches, Singles])
@pytest.mark.parametrize("record", [0, 1, 7])
def test_a_record_that_does_not_load_stops_the_run_and_is_not_named(kind, record):
    def change(_):
        raise OSError(f"record {record} cannot be read")

    source = kind(change, record)
    load = loader_of(source, 12)
    message = r"source raised OSError in .*, line \d+ .* dpmp\.check_source\(source\)"
    if record == 7:
        load_batch(load, [2, 4], 4)
    num_asked = len(source.asked)
    error = hidden(load, [record, 9], RuntimeError, message, f"record {record}")
    # The line of the source is there, for the one who has to mend it.
    assert "raise OSError(" in str(error)
    # An error of a later batch is not taken for a refusal of its indices.
    assert record < 7 or len(source.asked) == num_asked + 1


class PanicError(BaseException):
    """As pyo3 raises it: neither an Exception nor an interrupt."""


@pytest.mark.parametrize(
    "error",
    [
        ValueError("record 7"),
        MemoryError("(37, 3)"),
        PanicError("record 7"),
        StopIteration("record 7"),
    ],
)
def test_the_error_of_a_lazy_row_is_not_shown(error):
    load = loader_of(Singles(lambda x: {**x, "x": Lazy(error)}), 12)
    assert load(np.array([2, 5]))["label"].tolist() == [3, 6]
    hidden(load, [2, 7], RuntimeError, type(error).__name__, str(error))


@pytest.mark.parametrize("place", ["ask", "stack", "zeros", "astype"])
def test_the_number_of_examples_is_not_in_an_error_of_numpy(place, monkeypatch):
    def full(*_, shape=(937, 2)):
        raise MemoryError(f"Unable to allocate 1 GiB for an array with shape {shape}")

    load = loader_of({"x": np.zeros((12, 2))} if place == "ask" else Singles(), 12)
    load(np.array([1]))
    if place == "ask":  # x[indices] of a dataset of arrays
        load.way = full, load.way[1]
    elif place == "astype":
        monkeypatch.setattr(jax.dtypes, "canonicalize_dtype", full)
    else:
        monkeypatch.setattr(np, place, full)
    hidden(load, [1, 2], RuntimeError, "MemoryError", "937")


class Leaving(SystemExit):
    def __init__(self, record):
        super().__init__(f"{record} is broken")


@pytest.mark.parametrize(
    ("error", "args"),
    [
        (KeyboardInterrupt("record 7"), ()),
        (GeneratorExit("record 7"), ()),
        # No scheduler may take the run for finished.
        (SystemExit("record 7"), (1,)),
        (Leaving("record 7"), (1,)),
        (SystemExit(143), (143,)),
    ],
)
def test_an_interrupt_by_the_source_says_nothing(error, args):
    is_signal = args == (143,)
    if is_signal:
        error.is_signal = True
    error.add_note("record 7")

    def change(example):
        try:
            raise OSError("record 7")
        except OSError:
            raise error from None

    kind = SystemExit if args else type(error)
    found = hidden(loader_of(Singles(change), 12), [3, 7], kind, None, "record 7")
    assert type(found) is kind
    assert found.args == args
    assert hasattr(found, "is_signal") == is_signal


class AsSource(Sized):
    def __init__(self, column):
        self.column = column

    def __getitem__(self, indices):
        return self.column[indices]


WIDE = {
    "float64": np.array([1.0, 1e300, 1e-300] * 4),
    "complex128": np.array([1.0, 1e300 + 1e300j, 2.0] * 4),
    "int64": np.array([1, 2**40, -(2**63)] * 4),
    "uint64": np.array([1, 2**40, 2**63] * 4, np.uint64),
    "float16": np.array([1.0, 6e4, np.inf] * 4, np.float16),
}


@pytest.mark.parametrize("dtype", WIDE)
def test_no_value_causes_a_warning(dtype):
    column, indices = WIDE[dtype], np.array([0, 1, 2])
    with np.errstate(all="ignore"):
        expected = jnp.asarray(column[:3])
    with np.errstate(all="raise"):
        for source in (column, AsSource(column), {"x": column.tolist()}):
            batch = load_batch(loader_of(source, 12), indices, 4)
            jax.tree.map(jnp.asarray, batch)  # of the same dtypes already
        direct = as_device_dtypes({"x": column[:3], "y": expected})
    batch = load_batch(loader_of(column, 12), indices, 4)
    assert batch.dtype == expected.dtype == jax.dtypes.canonicalize_dtype(column.dtype)
    for x in (batch[:3], *direct.values()):
        np.testing.assert_array_equal(x, expected)
    assert direct["y"] is expected


def test_a_source_may_overflow_in_its_own_arithmetic():
    class Scaled(Sized):
        def __getitem__(self, indices):
            return np.float32([1e38, 1.0])[np.asarray(indices) % 2] * np.float32(10)

    with np.errstate(all="raise"):
        batch = loader_of(Scaled(), 12)(np.array([1, 2]))
    np.testing.assert_array_equal(batch, [10.0, np.inf])


def test_a_thread_casts_as_the_one_that_made_the_loader():
    with jax.enable_x64(True), ThreadPoolExecutor(1) as pool:
        load = loader_of(WIDE["float64"], 12)
        assert pool.submit(load, np.array([0, 1])).result().dtype == np.float64
    assert load(np.array([1])).dtype == np.float64
