"""A defective record is found by looking at all of them in order."""

import collections
import re

import numpy as np
import pytest
from sources.datasets import ARRAYS, Batches, Lazy, Singles

from dpmp.sources._check_source import check_source


def fail(_):
    raise OSError("the file is truncated")


@pytest.mark.parametrize(
    "source", [ARRAYS, Batches(), ARRAYS["x"], {"x": [1, 2], "y": [3, 4]}]
)
def test_a_good_dataset_passes(source):
    check_source(source)
    singles = Singles()
    check_source(singles)
    assert {*range(12)} <= {x for x in singles.asked if isinstance(x, int)}


@pytest.mark.parametrize("kind", [Singles, Batches])
@pytest.mark.parametrize("record", [0, 1, 2, 11])
def test_a_record_that_does_not_load_is_named_with_its_error(kind, record):
    message = rf"every record must load; got record={record}\. Repair it"
    with pytest.raises(ValueError, match=message) as error:
        check_source(kind(fail, record))
    causes = [error.value.__cause__, error.value.__cause__.__context__]
    assert "the file is truncated" in map(str, causes)


def twice(rows):
    return {name: x.repeat(2, 0) for name, x in rows.items()}


# With what the message says of the column.
CHANGES = {
    "shape": (
        lambda x: {**x, "x": np.concatenate([x["x"], x["x"]], axis=-1)},
        """'x']", in_the_first='float32[1, 2]', in_this='float32[1, 4]'""",
    ),
    "tree": (
        lambda x: {"x": x["x"]},
        """column="['label']", in_the_first='int64[1]', in_this='nothing'""",
    ),
    "node": (collections.OrderedDict, "column='(the tree)', in_the_first="),
    "rows": (twice, """'label']", in_the_first='int64[1]', in_this='int64[2]'"""),
}


# A single example has no number of rows.
SINGLE = [(Singles, name) for name in CHANGES if name != "rows"]


@pytest.mark.parametrize(
    ("kind", "name"), [*SINGLE, *((Batches, name) for name in CHANGES)]
)
def test_a_record_that_is_not_like_the_first_is_named(kind, name):
    change, column = CHANGES[name]
    said = rf"first one; got record=7, .*{re.escape(column)}.*\. Pad or convert"
    with pytest.raises(ValueError, match=said):
        check_source(kind(change))


def test_a_source_that_leaves_out_a_row_of_two_is_refused():
    source = Batches(lambda rows: {**rows, "x": rows["x"][:1]}, record=1)
    with pytest.raises(ValueError, match=r"^the source must return one row for each"):
        check_source(source)


def test_a_record_that_depends_on_others_is_named():
    source = Batches(lambda rows: {**rows, "x": rows["x"] - rows["x"].mean()})
    with pytest.raises(ValueError, match=r"whatever is loaded with it; got record=0"):
        check_source(source)


def test_the_error_of_a_lazy_row_is_attached():
    image = Lazy(ValueError("the image is truncated"))
    message = r"got record=7\. .* The reason: ValueError \(see above\)"
    with pytest.raises(ValueError, match=message) as error:
        check_source(Singles(lambda x: {**x, "x": image}))
    assert str(error.value.__cause__) == "the image is truncated"
