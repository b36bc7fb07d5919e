import collections
import io
import traceback
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpmp
from dpmp.sources._check_source import check_source
from dpmp.sources._source import Source, as_device_dtypes, load_batch, loader_of

ARRAYS = {
    "x": np.arange(1, 25, dtype=np.float32).reshape(12, 2),
    "label": np.arange(1, 13),
}


@pytest.mark.parametrize("indices", [[], [0], [2, 3, 11], list(range(12))])
def test_a_batch_holds_its_examples_and_zeros(indices):
    indices = np.array(indices, np.int64)
    batch, is_padding_example = load_batch(loader_of(ARRAYS, 12), indices, 12)
    np.testing.assert_array_equal(is_padding_example, np.arange(12) >= len(indices))
    for name, x in ARRAYS.items():
        assert batch[name].shape == x.shape
        np.testing.assert_array_equal(batch[name][: len(indices)], x[indices])
        assert not batch[name][len(indices) :].any()


@pytest.mark.parametrize(
    "source",
    [
        {"x": np.zeros((11, 3)), "label": np.zeros(11)},
        {"x": np.zeros((12, 3)), "label": np.zeros(13)},
        {"x": np.zeros((12, 3)), "label": np.zeros(())},
        collections.UserList(range(13)),
    ],
    ids=["smaller", "uneven", "scalar", "with-length"],
)
def test_a_dataset_of_another_size_is_refused(source):
    with pytest.raises(ValueError, match="dataset must hold the 12 examples"):
        loader_of(source, 12)


class Indexable:
    """Gives examples, and does not say how many it has."""

    def __getitem__(self, indices):
        return jax.tree.map(lambda x: x[indices], ARRAYS)


class Sized(Indexable):
    def __len__(self):
        return 12


def test_something_that_gives_no_examples_or_no_size_is_refused():
    for source in (io.StringIO(), Indexable(), [1, 2], {}, None):
        with pytest.raises(ValueError, match="with __getitem__ and __len__; got datas"):
            loader_of(source, 12)


def test_a_source_that_says_its_size_is_taken_at_its_word():
    for source in (Sized(), ARRAYS):
        assert loader_of(source, 12)(np.array([3, 5]))["label"].tolist() == [4, 6]
        with pytest.raises(ValueError, match="dataset must hold the 13 examples"):
            loader_of(source, 13)


@pytest.mark.parametrize(
    "rows",
    [lambda _: np.float32(3.0), lambda x: x["x"][:1], lambda x: x["x"].repeat(2, 0)],
    ids=["none", "few", "many"],
)
def test_rows_that_do_not_match_the_indices_are_refused_without_a_number(rows):
    class Wrong(Sized):
        def __getitem__(self, indices):
            len(indices)  # accepts no integers
            return rows(super().__getitem__(indices))

    with pytest.raises(ValueError, match="one row for each index") as error:
        load_batch(loader_of(Wrong(), 12), np.array([1, 5]), 12)
    assert not any(letter.isdigit() for letter in str(error.value))


def test_users_find_it_where_messages_say_it_is():
    assert dpmp.Source is Source


class OneByOne:
    """Gives one example for one integer, as grain and PyTorch do."""

    def __init__(self):
        self.asked = []

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.asked.append(index)
        return {name: x[range(12).index(index)] for name, x in ARRAYS.items()}


class Lists(Sized):
    """Gives lists, as datasets of Hugging Face do."""

    def __getitem__(self, indices):
        return {name: x[indices].tolist() for name, x in ARRAYS.items()}


@pytest.mark.parametrize(
    "source",
    [
        OneByOne(),
        Lists(),
        {name: x.tolist() for name, x in ARRAYS.items()},
        {**ARRAYS, "label": ARRAYS["label"].tolist()},
    ],
    ids=["one-by-one", "lists", "dict-of-lists", "arrays-and-lists"],
)
def test_datasets_as_people_have_them_give_the_same_batches(source):
    load = loader_of(source, 12)
    for indices in ([], [7], [3, 5, 11]):
        batch, _ = load_batch(load, np.array(indices, np.int64), 4)
        expected, _ = load_batch(loader_of(ARRAYS, 12), np.array(indices, int), 4)
        for name, x in expected.items():
            np.testing.assert_array_equal(batch[name], x)
            assert batch[name].shape == x.shape


def test_a_source_of_single_examples_is_asked_for_the_sampled_ones_alone():
    source = OneByOne()
    load = loader_of(source, 12)
    load(np.array([3, 5]))
    load(np.array([7]))
    # The first two records show what kind of source it is.
    assert [x for x in source.asked if isinstance(x, int)] == [0, 1, 3, 5, 7]


class Broken:
    """One record does not load. Gives a batch, or a single example."""

    def __init__(self, record, gives_single):
        self.record, self.gives_single, self.asked = record, gives_single, []

    def __len__(self):
        return 12

    def __getitem__(self, indices):
        self.asked.append(indices)
        if self.gives_single == isinstance(indices, np.ndarray):
            raise TypeError("these are no indices of mine")
        if self.record in np.atleast_1d(indices):
            raise OSError(f"record {self.record} cannot be read")
        return jax.tree.map(lambda x: x[indices], ARRAYS)


def frames(error):
    return traceback.extract_tb(error.__traceback__)


def every_text_of(error):
    """What a log may show of an exception and of those it was raised from."""
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize("gives_single", [False, True])
@pytest.mark.parametrize("record", [0, 1, 7])
def test_a_record_that_does_not_load_stops_the_run_and_is_not_named(
    gives_single, record
):
    load = loader_of(Broken(record, gives_single), 12)
    # If the first records are defective, what kind of source it is remains open.
    name = "OSError" if gives_single or record > 1 else "TypeError"
    message = rf"source raised {name} in .*, line \d+ .* dpmp\.check_source\(source\)"
    if record == 7:
        load_batch(load, np.array([2, 4]), 4)
    with pytest.raises(RuntimeError, match=message) as caught:
        load_batch(load, np.array([record, 9]), 4)
    assert caught.value.__cause__ is caught.value.__context__ is None
    text = every_text_of(caught.value)
    assert f"record {record}" not in text
    assert not any("__getitem__" in x.name for x in frames(caught.value))
    # But the line of the source is there, for the one who has to mend it.
    assert f"raise {name}(" in text


def test_an_error_of_a_later_batch_is_not_taken_for_a_refusal_of_indices():
    source = Broken(7, gives_single=False)
    load = loader_of(source, 12)
    load(np.array([3, 5]))
    num_asked = len(source.asked)
    with pytest.raises(RuntimeError, match="raised OSError"):
        load(np.array([7, 9]))
    assert len(source.asked) == num_asked + 1


class Normalised(Sized):
    """Takes arrays of indices by accident, and then mixes the examples of a batch."""

    def __getitem__(self, index):
        x = ARRAYS["x"][index]
        return {"x": x - x.mean(), "label": ARRAYS["label"][index]}


class AsBatchOfOne(Sized):
    """Takes an integer for an array of one."""

    def __getitem__(self, indices):
        return super().__getitem__(np.atleast_1d(indices))


def test_one_example_is_not_taken_for_rows_of_the_same_bytes():
    class Blank:
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return np.zeros(3)

    assert loader_of(Blank(), 1)(np.array([0])).shape == (1, 3)


def test_examples_do_not_depend_on_the_others_of_their_batch():
    batch = loader_of(Normalised(), 12)(np.array([3, 5]))
    np.testing.assert_array_equal(batch["x"], [[-0.5, 0.5]] * 2)


def test_an_integer_may_stand_for_a_batch_of_one():
    batch = loader_of(AsBatchOfOne(), 12)(np.array([3, 5]))
    np.testing.assert_array_equal(batch["x"], ARRAYS["x"][[3, 5]])


def test_an_empty_batch_is_not_asked_for():
    source = Broken(7, gives_single=True)
    batch, is_padding = load_batch(loader_of(source, 12), np.zeros(0, int), 3)
    assert not any(len(np.atleast_1d(x)) == 0 for x in source.asked)
    assert batch["x"].shape == (3, 2)
    assert is_padding.all()


class Changes(OneByOne):
    """Record 7 is not like the others."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def __getitem__(self, index):
        example = super().__getitem__(index)
        return self.change(example) if index == 7 else example


@pytest.mark.parametrize(
    "change",
    [
        lambda x: {"x": x["x"]},
        lambda x: {**x, "x": x["x"].astype(np.float64)},
        lambda x: {**x, "x": x["x"][:1]},
    ],
    ids=["tree", "dtype", "shape"],
)
def test_an_example_that_is_not_like_the_others_is_refused_and_not_shown(change):
    load = loader_of(Changes(change), 12)
    with pytest.raises(ValueError, match=r"same tree, shapes.*check_source") as error:
        load(np.array([3, 7]))
    assert not any(letter.isdigit() for letter in str(error.value))


def test_mapped_files_are_not_read_as_a_whole(tmp_path):
    expected = np.arange(24.0).reshape(12, 2)
    np.save(tmp_path / "x.npy", expected)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    load = loader_of({"x": mapped, "mask": np.ones(12, bool)}, 12)
    assert np.shares_memory(load.ask(slice(None))["x"], mapped)
    np.testing.assert_array_equal(load(np.array([2, 9]))["x"], expected[[2, 9]])


def test_nested_trees_with_masks_and_labels_keep_their_shape_and_dtypes():
    nested = {
        "text": {"tokens": np.ones((12, 4), np.int32), "mask": np.ones((12, 4), bool)},
        "targets": (np.arange(12), np.ones((12, 2, 2), np.float16)),
    }

    class Nested(Sized):
        def __getitem__(self, indices):
            return jax.tree.map(lambda x: x[indices], nested)

    for source in (nested, Nested()):
        batch, _ = load_batch(loader_of(source, 12), np.array([2, 9]), 3)
        assert jax.tree.structure(batch) == jax.tree.structure(nested)
        for x, column in zip(*map(jax.tree.leaves, (batch, nested)), strict=True):
            assert x.dtype == jax.dtypes.canonicalize_dtype(column.dtype)
            np.testing.assert_array_equal(x[:2], column[[2, 9]])
            assert not x[2:].any()


class RandomAccess:
    """What grain calls a RandomAccessDataSource."""

    def __len__(self):
        return 12

    def __getitem__(self, record_key):
        return {name: x[record_key] for name, x in ARRAYS.items()}


def grain_datasets():
    grain = pytest.importorskip("grain")
    by_number = grain.MapDataset.range(1, 13)
    return {
        "source": grain.MapDataset.source(RandomAccess()),
        # These calculate with an array of indices as if it were one index.
        "calculated": by_number.map(
            lambda i: {"x": np.arange(2, dtype=np.float32) + 2 * i - 1, "label": i}
        ),
        "mapped": grain.MapDataset.source(RandomAccess()).map(lambda x: dict(x)),
    }


@pytest.mark.parametrize("name", ["source", "calculated", "mapped"])
def test_datasets_of_grain_give_the_same_batches(name):
    load = loader_of(grain_datasets()[name], 12)
    for indices in ([], [7], [3, 5, 11]):
        batch = load(np.array(indices, np.int64))
        for column, x in ARRAYS.items():
            np.testing.assert_array_equal(batch[column], x[np.array(indices, int)])
            assert batch[column].shape == (len(indices), *x.shape[1:])


def test_an_example_that_grain_filtered_out_is_refused():
    dataset = grain_datasets()["source"].filter(lambda x: x["label"] != 8)
    load = loader_of(dataset, 12)
    with pytest.raises(ValueError, match="same tree"):
        load(np.array([3, 7]))


def test_tables_become_columns():
    pandas = pytest.importorskip("pandas")
    columns = {"a": np.arange(12), "b": np.arange(12) / 2}
    load = loader_of(pandas.DataFrame(columns), 12)
    batch, _ = load_batch(load, np.array([2, 9]), 3)
    expected = {"a": [2, 9, 0], "b": [1.0, 4.5, 0.0]}
    assert {name: x.tolist() for name, x in batch.items()} == expected
    np.testing.assert_array_equal(
        loader_of(pandas.Series(columns["b"]), 12)(np.array([3])), [1.5]
    )


@pytest.mark.parametrize("format", [None, "numpy"])
def test_datasets_of_hugging_face_give_the_same_batches(format):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({k: x.tolist() for k, x in ARRAYS.items()})
    load = loader_of(rows.with_format(format), 12)
    for indices in ([], [7], [3, 5, 11]):
        batch = load(np.array(indices, np.int64))
        for name, x in ARRAYS.items():
            np.testing.assert_array_equal(batch[name], x[np.array(indices, int)])
            assert batch[name].shape == (len(indices), *x.shape[1:])
    check_source(rows)


def test_a_loader_of_pytorch_is_refused_in_favour_of_its_dataset():
    class DataLoader:
        dataset, batch_size = ARRAYS, 4

        def __iter__(self):
            yield ARRAYS

        def __len__(self):
            return 3

    with pytest.raises(ValueError, match=r"DataLoader'\. .* pass its loader\.dataset"):
        loader_of(DataLoader(), 12)


def test_text_is_refused_without_its_length():
    texts = {"name": np.array(["a name of 21 letters"] * 12)}
    with pytest.raises(ValueError, match=r"column=\"\['name'\]\", content='str_'") as e:
        loader_of(texts, 12)
    assert "20" not in str(e.value)
    assert "21" not in str(e.value)


@pytest.mark.parametrize(
    "example",
    [
        lambda n: {"x": [[1.0] * (1 + k) for k in range(n)]},
        lambda n: "z" * n,
        lambda _: (),
    ],
    ids=["ragged", "text", "nothing"],
)
def test_an_example_that_is_not_numbers_is_refused_and_not_shown(example):
    class Documents(Sized):
        def __getitem__(self, index):
            return example(7 * int(index) + 7)

    with pytest.raises(ValueError, match="all examples must be numbers") as caught:
        loader_of(Documents(), 12)(np.array([1]))
    assert not any(letter.isdigit() for letter in str(caught.value))
    assert caught.value.__cause__ is caught.value.__context__ is None


# What would say something about the batch.


WIDE = {
    "float64": np.array([1.0, 1e300, 1e-300] * 4),
    "complex128": np.array([1.0, 1e300 + 1e300j, 2.0] * 4),
    "int64": np.array([1, 2**40, -(2**63)] * 4),
    "uint64": np.array([1, 2**40, 2**63] * 4, np.uint64),
    "float16": np.array([1.0, 6e4, np.inf] * 4, np.float16),
}


class AsSource(Sized):
    def __init__(self, column):
        self.column = column

    def __getitem__(self, indices):
        return self.column[indices]


@pytest.mark.parametrize("errors", ["warn", "raise"])
@pytest.mark.parametrize("dtype", WIDE)
def test_no_value_causes_a_warning(dtype, errors):
    column, indices = WIDE[dtype], np.array([0, 1, 2])
    with np.errstate(all="ignore"):
        expected = jnp.asarray(column[:3])
    with np.errstate(all=errors):
        for source in (column, AsSource(column), {"x": column.tolist()}):
            batch, _ = load_batch(loader_of(source, 12), indices, 4)
            jax.tree.map(jnp.asarray, batch)  # of the same dtypes already
        direct = as_device_dtypes({"x": column[:3], "y": expected})
    batch, _ = load_batch(loader_of(column, 12), indices, 4)
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


class Lazy:
    """A row that is read when it becomes an array, as images of PIL are."""

    def __init__(self, index, error):
        self.index, self.error = index, error

    def __array__(self, dtype=None, copy=None):
        if self.index == 7:
            raise self.error
        return np.full(3, self.index, np.float32)


class LazyRows(Sized):
    def __init__(self, error):
        self.error = error

    def __getitem__(self, index):
        return Lazy(int(index), self.error)


class PanicError(BaseException):
    """As pyo3 raises it: neither an Exception nor an interrupt."""


@pytest.mark.parametrize(
    "error", [ValueError("record 7"), MemoryError("(37, 3)"), PanicError("record 7")]
)
def test_the_error_of_a_lazy_row_is_not_shown(error):
    load = loader_of(LazyRows(error), 12)
    np.testing.assert_array_equal(load(np.array([2, 5]))[:, 0], [2.0, 5.0])
    with pytest.raises(RuntimeError, match=type(error).__name__) as caught:
        load(np.array([2, 7]))
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert str(error) not in every_text_of(caught.value)
    assert not any("__array__" in x.name for x in frames(caught.value))


@pytest.mark.parametrize("place", ["ask", "stack", "pad", "astype"])
def test_the_number_of_examples_is_not_in_an_error_of_numpy(place, monkeypatch):
    def full(*_, shape=(937, 2)):
        raise MemoryError(f"Unable to allocate 1 GiB for an array with shape {shape}")

    source = {"ask": {"x": np.zeros((12, 2))}}.get(place, OneByOne())
    load = loader_of(source, 12)
    load(np.array([1]))
    if place == "ask":  # x[indices] of a dataset of arrays
        load.ask = full
    elif place == "astype":
        monkeypatch.setattr(jax.dtypes, "canonicalize_dtype", full)
    else:
        monkeypatch.setattr(np, place, full)
    with pytest.raises(RuntimeError, match="MemoryError") as caught:
        load_batch(load, np.array([1, 2]), 4)
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert "937" not in every_text_of(caught.value)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_by_the_source_says_nothing(kind):
    class Retrying(OneByOne):
        def __getitem__(self, index):
            try:
                if index == 7:
                    raise OSError("record 7")
            except OSError:
                raise kind("record 7") from None
            return super().__getitem__(index)

    load = loader_of(Retrying(), 12)
    with pytest.raises(kind) as caught:
        load(np.array([3, 7]))
    # No scheduler may take the run for finished.
    assert caught.value.args == ((1,) if kind is SystemExit else ())
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert "record 7" not in every_text_of(caught.value)


class Leaving(SystemExit):
    def __init__(self, record):
        super().__init__(f"{record} is broken")


@pytest.mark.parametrize("is_signal", [False, True])
def test_an_exit_with_arguments_says_nothing(is_signal):
    class Loud(OneByOne):
        def __getitem__(self, index):
            if index == 7:
                error = SystemExit(143) if is_signal else Leaving("record 7")
                if is_signal:
                    error.is_signal = True
                error.add_note("record 7")
                raise error
            return super().__getitem__(index)

    with pytest.raises(SystemExit) as caught:
        loader_of(Loud(), 12)(np.array([3, 7]))
    assert type(caught.value) is SystemExit
    assert caught.value.code == (143 if is_signal else 1)
    assert hasattr(caught.value, "is_signal") == is_signal
    assert "record 7" not in every_text_of(caught.value)
    assert not getattr(caught.value, "__notes__", [])
