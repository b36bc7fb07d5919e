import dp_accounting
import jax.numpy as jnp
import pytest

from dpmp import DPSGD, clipped_grad

Relation = dp_accounting.NeighboringRelation


@pytest.fixture(scope="module")
def bounded():
    return clipped_grad(
        lambda w, x: jnp.mean(x @ w),
        l2_clip_norm=2.0,
        method="book_keeping",
        arithmetic="bounded",
    )


def test_bounded_sums_have_a_sensitivity_for_neighbours_of_equal_size(bounded):
    assert bounded.sensitivity() == 2.0
    assert bounded.sensitivity(Relation.REPLACE_ONE) == 4.0


def test_bounded_sums_have_none_for_neighbours_that_move_other_examples(bounded):
    with pytest.raises(
        ValueError, match=r"neighbours of equal size.*REPLACE_SPECIAL.*per_example"
    ):
        bounded.sensitivity(Relation.ADD_OR_REMOVE_ONE)
    with pytest.raises(ValueError, match="neighbours of equal size"):
        DPSGD(
            num_examples=100,
            expected_batch_size=10,
            iterations=1,
            l2_clip_norm=1.0,
            method="book_keeping",
            arithmetic="bounded",
            neighboring_relation=Relation.ADD_OR_REMOVE_ONE,
        )


@pytest.mark.parametrize("relation", Relation)
@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_no_sensitivity_of_book_keeping_is_unproved_unless_that_was_said(
    relation, dtype
):
    def sensitivity(**options):
        fn = clipped_grad(
            lambda w, x: jnp.mean(x @ w),
            l2_clip_norm=2.0,
            method="book_keeping",
            dtype=dtype,
            **options,
        )
        return fn.sensitivity(relation)

    if dtype is not None or relation is Relation.ADD_OR_REMOVE_ONE:
        with pytest.raises(
            ValueError,
            match=r"equal size|with method=.per_example",
        ):
            sensitivity()
    said = sensitivity(arithmetic="unproved_float32")
    assert said == (4.0 if relation is Relation.REPLACE_ONE else 2.0)
