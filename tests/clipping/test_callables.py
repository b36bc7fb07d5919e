import dp_accounting
import jax.numpy as jnp
import pytest

from dpmp import DPSGD, clipped_grad

Relation = dp_accounting.NeighboringRelation


BOUNDED = {"method": "book_keeping", "arithmetic": "bounded"}


def clip(**options):
    return clipped_grad(lambda w, x: jnp.mean(x @ w), l2_clip_norm=2.0, **options)


def test_bounded_sums_need_neighbours_of_equal_size():
    bounded = clip(**BOUNDED)
    assert bounded.sensitivity() == 2.0
    assert bounded.sensitivity(Relation.REPLACE_ONE) == 4.0
    with pytest.raises(
        ValueError, match=r"neighbours of equal size.*REPLACE_SPECIAL.*per_example"
    ):
        bounded.sensitivity(Relation.ADD_OR_REMOVE_ONE)
    fields = {"num_examples": 100, "expected_batch_size": 10, "iterations": 1}
    fields["neighboring_relation"] = Relation.ADD_OR_REMOVE_ONE
    with pytest.raises(ValueError, match="neighbours of equal size"):
        DPSGD(**fields, **BOUNDED, l2_clip_norm=1.0)


@pytest.mark.parametrize("relation", Relation)
@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_no_sensitivity_of_book_keeping_is_unproved_unless_that_was_said(
    relation, dtype
):
    options = {"method": "book_keeping", "dtype": dtype}
    if dtype is not None or relation is Relation.ADD_OR_REMOVE_ONE:
        with pytest.raises(ValueError, match=r"equal size|with method=.per_example"):
            clip(**options).sensitivity(relation)
    said = clip(**options, arithmetic="unproved_float32").sensitivity(relation)
    assert said == (4.0 if relation is Relation.REPLACE_ONE else 2.0)
