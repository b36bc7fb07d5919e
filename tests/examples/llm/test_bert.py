"""The encoder equals the one of transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import llm
from examples.llm import bert


@pytest.fixture
def model_name():
    return "bert"


def test_vectors_equal_those_of_transformers(folder, expected):
    model = llm.load(folder)
    tokens, is_token = expected["tokens"], expected["is_token"]
    apply = jax.jit(model.apply)
    vectors, pooled = apply(model.params, tokens, is_token)
    # transformers computes vectors for padding too, which nothing uses.
    error = np.abs(vectors - expected["vectors"])[is_token]
    assert error.max() < 1e-4
    np.testing.assert_allclose(pooled, expected["pooled"], rtol=0, atol=1e-4)
    # Padding has no influence.
    tokens, is_token, texts = tokens[1], is_token[1], []
    for n in (is_token.sum(), len(tokens)):
        vectors, _ = apply(model.params, tokens[:n], is_token[:n])
        texts.append(bert.mean_vectors(vectors, is_token[:n]))
    np.testing.assert_allclose(*texts, rtol=0, atol=1e-6)


def test_a_saved_encoder_is_the_loaded_one(folder, tmp_path):
    model = llm.load(folder)
    llm.save(tmp_path / "saved", model)
    again = llm.load(tmp_path / "saved")
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, model.params, again.params)


def test_a_text_without_tokens_has_finite_gradients(folder):
    model = llm.load(folder)
    tokens, is_token = np.zeros((1, 5), np.int32), np.zeros((1, 5), bool)

    def loss(params):
        vectors, pooled = model.apply(params, tokens, is_token)
        return jnp.sum(bert.mean_vectors(vectors, is_token)) + jnp.sum(pooled)

    for grad in jax.tree.leaves(jax.jit(jax.grad(loss))(model.params)):
        assert np.isfinite(grad).all()


def test_book_keeping_has_a_rule_for_every_parameter(check_rules, folder, expected):
    model = llm.load(folder)

    def loss(params, batch):
        vectors, pooled = model.apply(params, batch["tokens"], batch["is_token"])
        texts = bert.mean_vectors(vectors, batch["is_token"])
        return jnp.sum(texts) + jnp.sum(pooled)

    batch = {name: expected[name] for name in ("tokens", "is_token")}
    check_rules(loss, model.params, batch)


def test_long_texts_keep_the_mark_at_their_end(llama):
    tokenizer = llm.load(llama).tokenizer
    batch = bert.make_text_batch(tokenizer, ["a.", "the hen ate the hen."], 3)
    a, end = tokenizer.encode("a.")
    first, second = tokenizer.encode("the hen ate the hen.")[:2]
    assert batch["tokens"].tolist() == [[a, end, 0], [first, second, end]]
    assert batch["is_token"].tolist() == [[True, True, False], [True, True, True]]
