import collections
import io

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
    assert [x for x in source.asked if isinstance(x, int)] == [3, 5, 7]


class FailsLater(Sized):
    """Gives one batch, and then an error that has nothing to do with indices."""

    def __init__(self):
        self.asked = []

    def __getitem__(self, indices):
        self.asked.append(indices)
        if len(self.asked) > 1:
            raise OSError("the disk is gone")
        return super().__getitem__(indices)


def test_an_error_of_a_later_batch_is_not_taken_for_a_refusal_of_indices():
    source = FailsLater()
    load = loader_of(source, 12)
    load(np.array([3, 5]))
    with pytest.raises(OSError, match="the disk is gone"):
        load(np.array([7, 9]))
    assert len(source.asked) == 2


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
