import collections
import io
import traceback

import jax
import numpy as np
import pytest

import dpmp
from dpmp import training
from dpmp.training._source import Source, load_batch, loader_of

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
        assert batch[name].dtype == x.dtype
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


def test_an_array_without_rows_is_refused_without_a_number():
    class Wrong(Sized):
        def __getitem__(self, indices):
            return np.float32(len(indices))

    with pytest.raises(ValueError, match="one row for each index") as error:
        load_batch(Wrong().__getitem__, np.array([1, 5]), 12)
    assert not any(letter.isdigit() for letter in str(error.value))


@pytest.mark.parametrize("num_rows", [1, 13])
def test_rows_that_do_not_match_the_indices_are_refused_without_a_number(num_rows):
    class Wrong(Sized):
        def __getitem__(self, indices):
            return {name: x[:1].repeat(num_rows, 0) for name, x in ARRAYS.items()}

    message = r"one row for each index; got another number\. See dpmp\.Source"
    with pytest.raises(ValueError, match=message) as error:
        load_batch(Wrong().__getitem__, np.array([1, 5]), 12)
    assert not any(letter.isdigit() for letter in str(error.value))


def test_users_find_it_where_messages_say_it_is():
    assert dpmp.Source is training.Source is Source


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


class Table:
    """A table of pandas, as far as it is needed."""

    iloc = None
    columns = ("a", "b")

    class Column:
        def to_numpy(self):
            return np.arange(12)

    def __getitem__(self, name):
        assert name in self.columns
        return self.Column()


@pytest.mark.parametrize(
    "source",
    [OneByOne(), Lists(), {name: x.tolist() for name, x in ARRAYS.items()}],
    ids=["one-by-one", "lists", "dict-of-lists"],
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
    message = rf"the source raised {name}\. .* dpmp\.check_source\(source\) goes over"
    if record == 7:
        load_batch(load, np.array([2, 4]), 4)
    with pytest.raises(RuntimeError, match=message) as caught:
        load_batch(load, np.array([record, 9]), 4)
    assert caught.value.__cause__ is caught.value.__context__ is None
    text = every_text_of(caught.value)
    assert f"record {record}" not in text
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
    with pytest.raises(ValueError, match=r"same tree of arrays.*check_source") as error:
        load(np.array([3, 7]))
    assert not any(letter.isdigit() for letter in str(error.value))


def test_no_example_at_all_is_refused():
    load = loader_of(Changes(lambda _: None), 12)
    with pytest.raises(ValueError, match="must have at least one array; got type='No"):
        load(np.array([3, 7]))


def test_mapped_files_are_not_read_as_a_whole(tmp_path):
    expected = np.arange(24.0).reshape(12, 2)
    np.save(tmp_path / "x.npy", expected)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    load = loader_of({"x": mapped, "mask": np.ones(12, bool)}, 12)
    (columns,) = [c.cell_contents for c in load.__closure__]
    assert np.shares_memory(columns["x"], mapped)
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
            assert x.dtype == column.dtype
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
    with pytest.raises(ValueError, match="at least one array"):
        load(np.array([3, 7]))


def test_tables_become_columns():
    batch, _ = load_batch(loader_of(Table(), 12), np.array([2, 9]), 3)
    assert {name: x.tolist() for name, x in batch.items()} == {
        "a": [2, 9, 0],
        "b": [2, 9, 0],
    }


def test_text_is_refused_without_its_length():
    texts = {"name": np.array(["a name of 21 letters"] * 12)}
    with pytest.raises(ValueError, match=r"column=\"\['name'\]\", content='text'") as e:
        loader_of(texts, 12)
    assert "20" not in str(e.value)
    assert "21" not in str(e.value)


def test_a_ragged_example_is_refused_without_its_length():
    class Documents:
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return {"x": [[1.0] * (1 + k) for k in range(7 * int(index) + 7)]}

    load = loader_of(Documents(), 4)
    with pytest.raises(ValueError, match="lists of different lengths") as caught:
        load(np.array([0]))
    assert "7" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
