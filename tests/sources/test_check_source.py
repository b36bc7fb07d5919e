"""A defective record is found by looking at all of them in order."""

import collections
import re

import numpy as np
import pytest

from dpmp.sources._check_source import check_source

SIZE = 302
ARRAYS = {"x": np.arange(2.0 * SIZE).reshape(SIZE, 2), "label": np.arange(SIZE)}


class Singles:
    """Gives one example for one integer; `change` is applied to one of them."""

    def __init__(self, record=None, change=None):
        self.record, self.change, self.asked = record, change, []

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        if not isinstance(index, int):
            raise TypeError("one integer, please")
        self.asked.append(index)
        example = {name: x[index] for name, x in ARRAYS.items()}
        return self.change(example) if index == self.record else example


class Batches(Singles):
    """Gives all examples at an array of indices."""

    def __getitem__(self, indices):
        if isinstance(indices, int):
            raise TypeError("an array, please")
        batch = {name: x[indices] for name, x in ARRAYS.items()}
        return self.change(batch) if self.record in indices else batch


def fail(_):
    raise OSError("the file is truncated")


# With what the message says of the column.
CHANGES = {
    "shape": (
        lambda x: {**x, "x": np.concatenate([x["x"], x["x"]], axis=-1)},
        """'x']", in_the_first='float64[1, 2]', in_this='float64[1, 4]'""",
    ),
    "dtype": (
        lambda x: {**x, "x": x["x"].astype(np.float32)},
        """'x']", in_the_first='float64[1, 2]', in_this='float32[1, 2]'""",
    ),
    "tree": (
        lambda x: {"x": x["x"]},
        """column="['label']", in_the_first='int64[1]', in_this='nothing'""",
    ),
    "node": (collections.OrderedDict, "column='(the tree)', in_the_first="),
}


@pytest.mark.parametrize(
    "source", [ARRAYS, Batches(), ARRAYS["x"], {"x": [1, 2], "y": [3, 4]}]
)
def test_a_good_dataset_passes(source):
    check_source(source)
    singles = Singles()
    check_source(singles)
    assert set(singles.asked) == set(range(SIZE))


@pytest.mark.parametrize("kind", [Singles, Batches])
@pytest.mark.parametrize("record", [0, 1, 2, SIZE - 1])
def test_a_record_that_does_not_load_is_named_with_its_error(kind, record):
    message = rf"every record must load; got record={record}\. Repair it"
    with pytest.raises(ValueError, match=message) as error:
        check_source(kind(record, fail))
    causes = [error.value.__cause__, error.value.__cause__.__context__]
    assert "the file is truncated" in map(str, causes)


@pytest.mark.parametrize("kind", [Singles, Batches])
@pytest.mark.parametrize("name", CHANGES)
def test_a_record_that_is_not_like_the_first_is_named(kind, name):
    change, column = CHANGES[name]
    said = rf"first one; got record=300, .*{re.escape(column)}.*\. Pad or convert"
    with pytest.raises(ValueError, match=said):
        check_source(kind(300, change))


def test_a_record_that_comes_as_two_is_named():
    def twice(rows):
        return {name: x.repeat(2, 0) for name, x in rows.items()}

    said = r"record=300, column=.\['label'\].*'int64\[1\]', in_this='int64\[2\]'"
    with pytest.raises(ValueError, match=said):
        check_source(Batches(300, twice))


def test_a_source_that_leaves_out_a_row_of_two_is_refused():
    class Short(Batches):
        def __getitem__(self, indices):
            rows = super().__getitem__(indices)
            return {**rows, "x": rows["x"][:1]}

    with pytest.raises(ValueError, match=r"^the source must return one row for each"):
        check_source(Short())


def test_the_error_of_a_lazy_row_is_attached():
    class Lazy:
        def __array__(self, dtype=None, copy=None):
            raise ValueError("the image is truncated")

    message = r"got record=300\. .* The reason: ValueError \(see above\)"
    with pytest.raises(ValueError, match=message) as error:
        check_source(Singles(300, lambda x: {**x, "x": Lazy()}))
    assert str(error.value.__cause__) == "the image is truncated"
