"""The first line of a run says what runs."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting import NeighboringRelation

import dpmp
from dpmp.sources._source import loader_of
from dpmp.training._first_line import first_line


def loss_fn(params, batch, *key):
    return jnp.mean(jnp.tanh(batch @ params))


def first_line_of(*, loss_fn=loss_fn, uses_prng_key=False, **fields):
    mechanism = dpmp.DPSGD(
        num_examples=64,
        expected_batch_size=16,
        truncated_batch_size=64,
        sampling_prob=0.25,
        iterations=1,
        noise_multiplier=1.0,
        **fields,
    )
    trainer = dpmp.DPTrainer(
        mechanism=mechanism,
        loss_fn=loss_fn,
        optimizer=optax.sgd(0.1),
        policy="mixed_bfloat16",
        uses_prng_key=uses_prng_key,
    )
    data = np.ones((64, 2**10, 16), np.float32)
    state = trainer.init(jnp.ones((16, 16)))
    return first_line(trainer._step, state, loader_of(data, 64))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {},
            'method="book_keeping" (the fastest with a proof), arithmetic="bounded", '
            "up to 16 of 64 examples at a time, loss in bfloat16, "
            "256 entries are trained",
        ),
        ({"microbatch_size": 8, "uses_prng_key": True}, "up to 8 of 64 examples"),
        ({"method": "per_example"}, 'method="per_example", arithmetic="exact"'),
        (
            {"neighboring_relation": NeighboringRelation.ADD_OR_REMOVE_ONE},
            'method="per_example" (the fastest with a proof), arithmetic="exact", up',
        ),
        (
            {"l2_clip_norm": dpmp.AdaptiveClipNorm(initial=1.0, quantile=0.5)},
            "up to 16 of 64",
        ),
        # The step itself explains a loss that fails.
        ({"loss_fn": lambda params, batch: batch["z"]}, "as many examples as fit at a"),
    ],
    ids=["default", "sizes", "given", "protected number", "adaptive", "failure"],
)
def test_it_says_what_runs(fields, text):
    fields = {"l2_clip_norm": 1.0} | fields
    line = first_line_of(**fields)
    assert text in line
