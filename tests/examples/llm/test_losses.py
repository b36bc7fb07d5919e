"""Losses count targets only."""

import jax.numpy as jnp
import numpy as np
import pytest

from examples import llm


def apply(params, tokens):
    """The logits of a model that looks at the last token only."""
    return params[tokens]


@pytest.fixture
def params():
    return jnp.asarray(np.random.default_rng(0).normal(size=(6, 6)), jnp.float32)


def nats_of(params, before, token):
    row = np.asarray(params, np.float64)[before]
    return np.log(np.sum(np.exp(row))) - row[token]


def test_a_batch_marks_what_is_to_be_predicted(llama):
    tokenizer = llm.load(llama).tokenizer
    batch = llm.make_batch(tokenizer, ["he", "hen in the", ""], 3)
    hen, in_, the = tokenizer.encode("hen")[0], *tokenizer.encode("hen in")[1:3]
    assert batch["tokens"].tolist() == [[hen, 0, 0], [hen, in_, the], [0, 0, 0]]
    assert batch["is_target"].tolist() == [
        [False, False, False],
        [False, True, True],
        [False, False, False],
    ]


def test_the_loss_is_the_mean_over_targets(params):
    tokens = np.array([[1, 4, 2, 0]], np.int32)
    is_target = np.array([[False, True, True, False]])
    batch = {"tokens": tokens, "is_target": is_target}
    expected = (nats_of(params, 1, 4) + nats_of(params, 4, 2)) / 2
    np.testing.assert_allclose(llm.mean_nats(apply, params, batch), expected, rtol=1e-6)


def test_padding_has_no_influence(params):
    tokens = np.array([[1, 4, 2, 0, 0], [1, 4, 2, 5, 3]], np.int32)
    is_target = np.array([[False, True, True, False, False]] * 2)
    nats, counts = llm.summed_nats(
        apply, params, {"tokens": tokens, "is_target": is_target}
    )
    assert nats[0] == nats[1]
    assert counts.tolist() == [2, 2]


def test_an_example_without_targets_has_no_loss(params):
    batch = {"tokens": np.zeros((1, 4), np.int32), "is_target": np.zeros((1, 4), bool)}
    assert llm.mean_nats(apply, params, batch) == 0


def test_evaluation_weighs_targets_alike(params):
    rng = np.random.default_rng(1)
    batch = {
        "tokens": rng.integers(6, size=(5, 7)).astype(np.int32),
        "is_target": rng.random((5, 7)) < 0.5,
    }
    nats, counts = llm.summed_nats(apply, params, batch)
    value = llm.nats_per_token(apply, params, batch, batch_size=2)
    assert value == pytest.approx(float(nats.sum()) / float(counts.sum()), rel=1e-6)
