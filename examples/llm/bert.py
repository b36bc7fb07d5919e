"""The encoder of BERT, which turns texts into vectors.

Devlin et al. (2018), https://arxiv.org/abs/1810.04805, section 3. Reimers and Gurevych
(2019), https://arxiv.org/abs/1908.10084, section 3, make one vector of a text.
"""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ._config import Config
from .layers import (
    Attention,
    Embedding,
    FeedForward,
    LayerNorm,
    Linear,
    apply_stacked,
    check_length,
    stacked,
)
from .tokenizer import Tokenizer


class Block(nnx.Module):
    """Attention and a feed-forward part, each before a normalisation."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.attention = Attention(config, rngs, bias=True)
        self.attention_norm = LayerNorm(config.width, config.norm_epsilon)
        self.feed_forward = FeedForward(config, rngs, approximate_gelu=False)
        self.feed_forward_norm = LayerNorm(config.width, config.norm_epsilon)

    def __call__(
        self, x: jax.Array, cache: None, is_visible: jax.Array
    ) -> tuple[jax.Array, None]:
        """From and to (..., T, width); an encoder has no cache."""
        x = self.attention_norm(x + self.attention(x, is_visible)[0])
        return self.feed_forward_norm(x + self.feed_forward(x)), cache


class Bert(nnx.Module):
    """An encoder that gives a vector for each token, and one for the whole text."""

    def __init__(self, config: Config, rngs: nnx.Rngs, *, remat: bool = False):
        self.config, self.remat = config, remat
        self.embed = Embedding(config.vocabulary_size, config.width, rngs)
        self.position = Embedding(config.context, config.width, rngs)
        self.segment = Embedding(config.num_segments, config.width, rngs)
        self.norm = LayerNorm(config.width, config.norm_epsilon)
        block = functools.partial(Block, config)
        self.layers = stacked(block, config.num_layers, rngs)
        self.pool = Linear(config.width, config.width, rngs, bias=True)

    def __call__(
        self, tokens: jax.Array, is_token: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Encodes texts of one segment.

        Args:
          tokens: the tokens, (..., T).
          is_token: whether they are tokens or padding, (..., T).

        Returns:
          A vector for each token, (..., T, width), and the one that BERT was trained to
          compare two segments with, (..., width). See `mean_vectors` for texts.
        """
        check_length(tokens, self.config)
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[-1]))
        x = self.norm(x + self.segment.embedding[0])
        x = x.astype(self.layers.attention.query.kernel.dtype)
        is_visible = is_token[..., None, None, None, :]  # of (..., h, g, T, T)
        x, _ = apply_stacked(self.layers, x, is_visible, remat=self.remat)
        return x, jnp.tanh(self.pool(x[..., 0, :]))


def mean_vectors(vectors: jax.Array, is_token: jax.Array) -> jax.Array:
    """One vector of length 1 for each text: the direction of the mean of its tokens.

    From (..., T, width) and (..., T) to (..., width) in float32.
    """
    kept = jnp.where(is_token[..., None], vectors.astype(jnp.float32), 0)
    total = jnp.sum(kept, -2)  # has the direction of the mean
    return total / jnp.maximum(jnp.linalg.norm(total, axis=-1, keepdims=True), 1e-12)


def make_text_batch(
    tokenizer: Tokenizer, texts: Sequence[str], length: int
) -> Mapping[str, np.ndarray]:
    """Texts as "tokens" and "is_token", of the shape (len(texts), length) both.

    Longer texts are cut off, but keep the mark at their end. Shorter ones are padded.
    """
    tokens = np.zeros((len(texts), length), np.int32)
    is_token = np.zeros((len(texts), length), bool)
    for row, mask, text in zip(tokens, is_token, texts, strict=True):
        ids = tokenizer.encode(text)
        ids = [*ids[: length - 1], *ids[length - 1 :][-1:]]
        row[: len(ids)], mask[: len(ids)] = ids, True
    return {"tokens": tokens, "is_token": is_token}
