"""The encoder equals the one of transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import dpmp
from examples import llm
from examples.llm import bert


@pytest.fixture
def model_name():
    return "bert"


def test_vectors_equal_those_of_transformers(folder, expected):
    model = llm.load(folder)
    vectors, pooled = model.apply(
        model.params, expected["tokens"], expected["is_token"]
    )
    # transformers computes vectors for padding too, which nothing uses.
    error = np.abs(vectors - expected["vectors"])[expected["is_token"]]
    assert error.max() < 1e-4
    np.testing.assert_allclose(pooled, expected["pooled"], rtol=0, atol=1e-4)


def test_padding_has_no_influence(folder, expected):
    model = llm.load(folder)
    tokens, is_token = expected["tokens"][1], expected["is_token"][1]
    texts = []
    for n in (is_token.sum(), len(tokens)):
        vectors, _ = model.apply(model.params, tokens[:n], is_token[:n])
        texts.append(bert.mean_vectors(vectors, is_token[:n]))
    np.testing.assert_allclose(*texts, rtol=0, atol=1e-6)


def test_a_text_without_tokens_has_finite_gradients(folder):
    model = llm.load(folder)
    tokens, is_token = np.zeros((1, 5), np.int32), np.zeros((1, 5), bool)

    def loss(params):
        vectors, pooled = model.apply(params, tokens, is_token)
        return jnp.sum(bert.mean_vectors(vectors, is_token)) + jnp.sum(pooled)

    for grad in jax.tree.leaves(jax.grad(loss)(model.params)):
        assert np.isfinite(grad).all()


def test_written_weights_have_the_bits_of_those_read(folder, tmp_path):
    model = llm.load(folder)
    llm.save(tmp_path / "saved", model)
    before, after = (
        safetensors.numpy.load_file(path / "model.safetensors")
        for path in (folder, tmp_path / "saved")
    )
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(array, after[name], err_msg=name)
    assert llm.load(tmp_path / "saved").config == model.config


def test_transformers_loads_what_is_saved(folder, expected, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    llm.save(tmp_path / "saved", llm.load(folder))
    model = transformers.AutoModel.from_pretrained(tmp_path / "saved")
    tokens, is_token = (expected[x].astype(np.int64) for x in ("tokens", "is_token"))
    inputs = {"input_ids": tokens, "attention_mask": is_token}
    with torch.no_grad():
        found = model(**{name: torch.from_numpy(x) for name, x in inputs.items()})
    np.testing.assert_array_equal(found.pooler_output.numpy(), expected["pooled"])


def test_book_keeping_has_a_rule_for_every_parameter(folder, expected):
    model = llm.load(folder)

    def loss(params, batch):
        vectors, pooled = model.apply(params, batch["tokens"], batch["is_token"])
        texts = bert.mean_vectors(vectors, batch["is_token"])
        return jnp.sum(texts) + jnp.sum(pooled)

    batch = {name: expected[name] for name in ("tokens", "is_token")}
    summary = dpmp.book_keeping.summarize(loss, model.params, batch)
    rules = {rule for row in summary.rows for rule in row.rules}
    assert rules <= {"dot", "gather", "mul", "add"}
    assert all(row.rules for row in summary.rows)


def test_long_texts_keep_the_mark_at_their_end(llama):
    tokenizer = llm.load(llama).tokenizer
    batch = bert.make_text_batch(tokenizer, ["a.", "the hen ate the hen."], 3)
    a, end = tokenizer.encode("a.")
    first, second = tokenizer.encode("the hen ate the hen.")[:2]
    assert batch["tokens"].tolist() == [[a, end, 0], [first, second, end]]
    assert batch["is_token"].tolist() == [[True, True, False], [True, True, True]]
