"""The first line of a run says what runs, and whether another method is cheaper."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting import NeighboringRelation

import dpmp
from dpmp.engines.book_keeping._summary import relative_cost
from dpmp.sources._source import loader_of
from dpmp.training._first_line import first_line


def loss_fn(params, batch):
    return jnp.mean(jnp.tanh(batch @ params["w"]) @ params["out"])


def shapes(positions, width=64):
    params = {"w": jax.ShapeDtypeStruct((width, 128), jnp.float32)}
    params["out"] = jax.ShapeDtypeStruct((128,), jnp.float32)
    return params, jax.ShapeDtypeStruct((1, positions, width), jnp.float32)


def test_book_keeping_saves_where_gradients_are_larger_than_what_makes_them():
    few, many = (relative_cost(loss_fn, *shapes(n)) for n in (1, 128))
    # One position: three products with an entry, beside the sixteen for its memory.
    assert 3 / 19 < few < 1.1 * 3 / 19
    assert many > 0.9


def first_line_of(*, loss_fn=loss_fn, positions=1, width=1024, **fields):
    mechanism = dpmp.DPSGD(
        **{
            "num_examples": 8,
            "expected_batch_size": 4,
            "iterations": 1,
            "l2_clip_norm": 1.0,
            "noise_multiplier": 1.0,
            **fields,
        }
    )
    trainer = dpmp.DPTrainer(
        mechanism=mechanism,
        loss_fn=loss_fn,
        optimizer=optax.sgd(0.1),
        policy="mixed_bfloat16",
    )
    params = jax.tree.map(lambda x: jnp.ones(x.shape), shapes(positions, width)[0])
    data = np.ones((8, positions, width), np.float32)
    return first_line(trainer._step, trainer.init(params), loader_of(data, 8))


ADVICE = 'DPSGD(method="book_keeping")'


@pytest.mark.parametrize(
    ("fields", "is_advised"),
    [
        ({}, True),
        ({"method": "book_keeping"}, False),
        ({"positions": 64}, False),
        # The estimate is the same, but of a millisecond.
        ({"width": 64}, False),
        # Bounded sums have no sensitivity under this relation.
        ({"neighboring_relation": NeighboringRelation.ADD_OR_REMOVE_ONE}, False),
    ],
    ids=["cheaper", "book_keeping", "not cheaper", "small", "not allowed"],
)
def test_it_names_another_method_that_costs_half_or_less(fields, is_advised):
    line = first_line_of(**fields)
    assert line.startswith("method=")
    assert (ADVICE in line) == is_advised


def test_a_loss_or_a_dataset_at_fault_is_explained_by_the_step():
    assert ADVICE not in first_line_of(loss_fn=lambda params, batch: batch["z"])
