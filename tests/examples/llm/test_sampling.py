"""Texts are continued with the tokens that the model finds probable."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import llm


def alphabet(params, tokens):
    """The logits of a model that is almost sure of the next number."""
    return params * jax.nn.one_hot((tokens + 1) % 80, 80)


@pytest.fixture
def model(llama):
    return llm.load(llama)._replace(apply=alphabet, params=jnp.float32(20))


def test_the_most_probable_token_is_added(model, llama):
    assert llm.generate(model, "cab", num_tokens=4) == "cdef"
    model = llm.load(llama)
    text = llm.generate(model, "in the hen", num_tokens=2)
    tokens = model.tokenizer.encode("in the hen")
    apply = jax.jit(model.apply)
    for _ in range(2):
        # Later tokens have no influence.
        logits = apply(model.params, np.resize(tokens, 32))[len(tokens) - 1]
        tokens.append(int(np.argmax(logits)))
    assert model.tokenizer.decode(tokens[-2:]) == text


def test_samples_have_the_probabilities_of_the_temperature(model):
    sharp = {"temperature": 1.0, "key": jax.random.key(0)}
    assert llm.generate(model, "cab", num_tokens=4, **sharp) == "cdef"
    # The next letter has the logit 2 now, and 79 others have 0.
    flat = {"num_tokens": 25, "temperature": 10.0}
    texts = [
        llm.generate(model, "ab", key=jax.random.key(i), **flat) for i in (0, 0, 1)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert not texts[0].startswith("cdefg")


def test_an_end_token_stops_it(model):
    end, after_d = 2, 8  # numbers of tokens

    def ends(params, tokens):
        return jnp.roll(alphabet(params, tokens), end - after_d, -1)

    model = model._replace(apply=ends)
    assert model.config.end_tokens == (end,)
    assert llm.generate(model, "d", num_tokens=4) == ""


def test_what_cannot_be_continued_is_refused(model):
    with pytest.raises(ValueError, match="prompt must have at least one token"):
        llm.generate(model, "", num_tokens=3)
    with pytest.raises(ValueError, match="at most 32 tokens together; got 33"):
        llm.generate(model, "cab", num_tokens=30)
    with pytest.raises(ValueError, match="key must be a random key"):
        llm.generate(model, "cab", num_tokens=3, temperature=1.0)
