"""Losses count targets only."""

import functools

import jax
import numpy as np
import pytest

from examples import llm


def apply(params, tokens):
    """The logits of a model that looks at the last token only."""
    return params[tokens]


summed_nats = jax.jit(functools.partial(llm.summed_nats, apply))
mean_nats = jax.jit(functools.partial(llm.mean_nats, apply))


@pytest.fixture
def params():
    return np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)


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
    tokens = np.array([[1, 4, 2, 0, 0], [1, 4, 2, 5, 3], [0] * 5], np.int32)
    is_target = np.array([[0, 1, 1, 0, 0]] * 2 + [[0] * 5], bool)
    batch = {"tokens": tokens, "is_target": is_target}
    nats, counts = summed_nats(params, batch)
    # Padding has no influence.
    assert nats[0] == nats[1]
    assert counts.tolist() == [2, 2, 0]
    log_probs = np.asarray(params, np.float64)
    log_probs -= np.log(np.exp(log_probs).sum(axis=1, keepdims=True))
    expected = -log_probs[1, 4] - log_probs[4, 2]
    first, *_, empty = ({k: x[i : i + 1] for k, x in batch.items()} for i in range(3))
    for found in (nats[0], 2 * mean_nats(params, first)):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert mean_nats(params, empty) == 0
    # Evaluation weighs all targets alike, in whatever batch they are.
    batch["is_target"][1, 3:] = True
    nats, counts = summed_nats(params, batch)
    value = llm.nats_per_token(apply, params, batch, batch_size=2)
    assert value == pytest.approx(float(nats.sum()) / float(counts.sum()), rel=1e-6)
