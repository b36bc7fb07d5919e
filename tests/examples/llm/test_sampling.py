"""Texts are continued with the tokens that the model finds probable."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import llm
from examples.llm import sampling


def alphabet(params, tokens, cache):
    """The logits of a model that is almost sure of the next number."""
    return params * jax.nn.one_hot((tokens + 1) % 80, 80), cache


@pytest.fixture
def model(llama):
    return llm.load(llama)._replace(apply=alphabet, params=jnp.float32(20))


def greedy(model, prompt, num_tokens):
    """The most probable continuation, from passes over the whole text."""
    tokens = model.tokenizer.encode(prompt)
    apply = jax.jit(model.apply)
    for _ in range(num_tokens):
        # Later tokens have no influence.
        context = model.config.context
        logits = apply(model.params, np.resize(tokens, context))[len(tokens) - 1]
        tokens.append(int(np.argmax(logits)))
    return model.tokenizer.decode(tokens[-num_tokens:])


@pytest.mark.slow
def test_a_cache_does_not_change_the_texts(folder, monkeypatch):
    monkeypatch.setattr(sampling, "_LENGTHS", 2)  # two tokens are passed on at once
    model = llm.load(folder)
    model = model._replace(config=dataclasses.replace(model.config, end_tokens=()))
    prompts = ["in the hen", "the 12, in a cab"]
    assert {len(model.tokenizer.encode(x)) for x in prompts} == {5, 13}
    texts = llm.generate_batch(model, prompts, num_tokens=8)
    assert texts == [greedy(model, x, 8) for x in prompts]
    assert texts[0] != texts[1]


def test_samples_have_the_probabilities_of_the_temperature(model):
    sharp = {"temperature": 1.0, "key": jax.random.key(0)}
    for options in ({}, sharp):
        assert llm.generate(model, "cab", num_tokens=4, **options) == "cdef"
    # The next letter has the logit 2 now, and 79 others have 0.
    flat = {"num_tokens": 25, "temperature": 10.0}
    texts = [
        llm.generate(model, "ab", key=jax.random.key(i), **flat) for i in (0, 0, 1)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert not texts[0].startswith("cdefg")


def test_an_end_token_stops_it(model):
    end, after_d = 2, 8  # numbers of tokens

    def ends(params, tokens, cache):
        logits, cache = alphabet(params, tokens, cache)
        return jnp.roll(logits, end - after_d, -1), cache

    model = model._replace(apply=ends)
    assert model.config.end_tokens == (end,)
    assert llm.generate(model, "d", num_tokens=4) == ""
    # A text that has ended does not end the others.
    assert llm.generate_batch(model, ["d", "g"], num_tokens=2) == ["", "b<|endoftext|>"]


def test_what_cannot_be_continued_is_refused(model):
    with pytest.raises(ValueError, match="prompt must have at least one token"):
        llm.generate(model, "", num_tokens=3)
    with pytest.raises(ValueError, match="at most 32 tokens together; got 33"):
        llm.generate(model, "cab", num_tokens=30)
    with pytest.raises(ValueError, match="key must be a random key"):
        llm.generate(model, "cab", num_tokens=3, temperature=1.0)
