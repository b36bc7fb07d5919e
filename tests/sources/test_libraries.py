"""Datasets of pandas, Hugging Face, grain, PyTorch and files, with these packages."""

import sys
from collections.abc import Callable
from typing import Any

import datasets
import grain
import numpy as np
import pandas
import pytest
from jax.experimental import sparse
from sources.datasets import ARRAYS, Sized, assert_gives_examples_and_zeros, load_batch

from dpmp.sources import check_source, loader_of


def rows(format_=None):
    """A dataset of Hugging Face."""
    columns = {name: x.tolist() for name, x in ARRAYS.items()}
    return datasets.Dataset.from_dict(columns).with_format(format_)


def calculated(i):
    return {"x": np.arange(2, dtype=np.float32) + 2 * i - 1, "label": i}


EXAMPLES = grain.MapDataset.source(Sized())
DATASETS: dict[str, Callable[[], Any]] = {
    "Hugging Face": rows,
    "Hugging Face, numpy": lambda: rows("numpy"),
    "grain": lambda: EXAMPLES,
    "grain, mapped": lambda: EXAMPLES.map(lambda x: dict(x)),
    # Takes an array of indices for one index.
    "grain, calculated": lambda: grain.MapDataset.range(1, 13).map(calculated),
}


@pytest.mark.parametrize("name", DATASETS)
def test_datasets_give_their_examples_and_zeros(name):
    check_source(DATASETS[name]())
    assert_gives_examples_and_zeros(DATASETS[name]())


def test_tables_become_columns():
    columns = {"a": np.arange(12), "b": np.arange(12) / 2}
    batch = load_batch(loader_of(pandas.DataFrame(columns), 12), [2, 9], 3)
    expected = {"a": [2, 9, 0], "b": [1.0, 4.5, 0.0]}
    assert {name: x.tolist() for name, x in batch.items()} == expected
    series = loader_of(pandas.Series(columns["b"]), 12)
    np.testing.assert_array_equal(series(np.array([3])), [1.5])


def test_functions_on_the_fly_of_hugging_face_see_one_example():
    plain = datasets.Dataset.from_dict({"x": np.arange(12.0, dtype=np.float32)})
    sizes = []

    def normalised(rows):
        sizes.append(len(rows["x"]))
        return {"x": np.asarray(rows["x"]) - np.mean(rows["x"])}

    for dataset in (plain.with_format("numpy"), plain.with_transform(normalised)):
        load = loader_of(dataset, 12)
        load(np.array([3, 5, 7]))
        is_plain = dataset.format["type"] == "numpy"
        assert (load.way[0] == load.ask) == is_plain
    assert sizes[-3:] == [1, 1, 1]


IN_PLACE_OF_A_LOADER = r"pass the dataset that it reads .*loader\.dataset\). dpmp draws"
IN_A_DICT = r"pass one: data\[\"train\"\]\. Convert columns to arrays by np\.asarray"


def stream():
    return EXAMPLES.to_iter_dataset()


def loader_of_grain():
    sampler = grain.samplers.IndexSampler(12, num_epochs=1, seed=0)
    return grain.DataLoader(data_source=EXAMPLES, sampler=sampler)


REFUSED = {
    "splits": (lambda: datasets.DatasetDict(train=rows()), IN_A_DICT),
    "dict of splits": (lambda: {"train": rows(), "test": rows()}, IN_A_DICT),
    "Hugging Face, stream": (
        lambda: rows().to_iterable_dataset(),
        IN_PLACE_OF_A_LOADER,
    ),
    "grain, stream": (stream, IN_PLACE_OF_A_LOADER),
    "grain, iterator": (lambda: iter(stream()), IN_PLACE_OF_A_LOADER),
    "grain, loader": (loader_of_grain, IN_PLACE_OF_A_LOADER),
    "grain, batches": (lambda: EXAMPLES.batch(4), "neither repeated nor in batches"),
    "grain, repeated": (lambda: EXAMPLES.repeat(2), "neither repeated nor in batches"),
    "text": (
        lambda: pandas.DataFrame({"x": ["a"] * 12}),
        r"got column=\"\['x'\]\".* Turn text and categories into numbers \(docs/data",
    ),
}


def test_another_byte_order_is_refused_by_its_name():
    with pytest.raises(ValueError, match=r"column=\"\['x'\]\".*newbyteorder"):
        loader_of({"x": np.ones((12, 2), np.dtype(np.float32).newbyteorder())}, 12)


def test_a_sparse_matrix_of_jax_is_refused():
    matrix = sparse.BCOO.fromdense(np.eye(12, dtype=np.float32), n_batch=1)
    with pytest.raises(ValueError, match=r"column=\"\['x'\]\".*make sparse matrices"):
        loader_of({"x": matrix}, 12)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_says_what_to_pass(name):
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        loader_of(make(), 12)


def test_an_endless_dataset_is_refused_even_if_its_size_was_used():
    endless = EXAMPLES.repeat()
    for use in (check_source, lambda x: loader_of(x, len(x))):
        with pytest.raises(ValueError, match=r"Leave out repeat\(\)") as caught:
            use(endless)
        assert str(sys.maxsize) in str(caught.value)


def test_datasets_of_torch_are_taken_and_loaders_refused():
    """Needs PyTorch, which is large: `pip install '.[llm-fixtures]'`."""
    torch = pytest.importorskip("torch")
    data = torch.utils.data
    pairs = data.TensorDataset(*map(torch.from_numpy, ARRAYS.values()))

    class Photos(data.Dataset):
        __len__ = Sized.__len__

        def __getitem__(self, index):
            return dict(zip(ARRAYS, pairs[index], strict=True))

    class Stream(data.IterableDataset):
        def __iter__(self):
            return iter(pairs)

    halves = [data.Subset(Photos(), range(6)), data.Subset(Photos(), range(6, 12))]
    for source in (Photos(), data.ConcatDataset(halves)):
        check_source(source)
        assert_gives_examples_and_zeros(source)
    assert_gives_examples_and_zeros(pairs, tuple(ARRAYS.values()))
    sampler = data.RandomSampler(pairs)
    batches = data.BatchSampler(sampler, 4, drop_last=False)
    for source in (data.DataLoader(pairs, batch_size=4), sampler, batches, Stream()):
        with pytest.raises(ValueError, match=IN_PLACE_OF_A_LOADER):
            loader_of(source, 12)
