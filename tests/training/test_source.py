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
        {},
        collections.UserList(range(13)),
    ],
    ids=["smaller", "uneven", "scalar", "empty", "with-length"],
)
def test_a_dataset_of_another_size_is_refused(source):
    with pytest.raises(ValueError, match="source must hold the 12 examples"):
        loader_of(source, 12)


class Indexable:
    """Gives examples, and does not say how many it has."""

    def __getitem__(self, indices):
        return jax.tree.map(lambda x: x[indices], ARRAYS)


class Sized(Indexable):
    def __len__(self):
        return 12


def test_something_that_gives_no_examples_or_no_size_is_refused():
    for source in (io.StringIO(), Indexable(), [1, 2]):
        with pytest.raises(ValueError, match="with __getitem__ and __len__; got sourc"):
            loader_of(source, 12)


def test_a_source_that_says_its_size_is_taken_at_its_word():
    for source in (Sized(), ARRAYS):
        assert loader_of(source, 12)(np.array([3, 5]))["label"].tolist() == [4, 6]
        with pytest.raises(ValueError, match="source must hold the 13 examples"):
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

    message = r"one row for each index; got another number\. See dpmp\.training\.Source"
    with pytest.raises(ValueError, match=message) as error:
        load_batch(Wrong().__getitem__, np.array([1, 5]), 12)
    assert not any(letter.isdigit() for letter in str(error.value))


def test_users_find_it_where_messages_say_it_is():
    assert dpmp.Source is training.Source is Source
