"""The decoder of GPT-2: LayerNorm, learned positions, and biases everywhere.

Radford et al. (2019), "Language models are unsupervised multitask learners", section
2.3.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ._config import Config
from .layers import (
    Attention,
    Cache,
    Embedding,
    FeedForward,
    LayerNorm,
    Linear,
    apply_stacked,
    causal,
    check_length,
    logits,
    positions,
    stacked,
)


class Block(nnx.Module):
    """Attention and a feed-forward part, each after a normalisation."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.attention_norm = LayerNorm(config.width, config.norm_epsilon)
        self.attention = Attention(config, rngs, bias=True)
        self.feed_forward_norm = LayerNorm(config.width, config.norm_epsilon)
        self.feed_forward = FeedForward(config, rngs, approximate_gelu=True)

    def __call__(
        self, x: jax.Array, cache: Cache | None, is_visible: jax.Array
    ) -> tuple[jax.Array, Cache | None]:
        """From and to (..., T, width), with the cache after these tokens."""
        y = self.attention_norm(x)
        y, cache = self.attention(y, is_visible, cache=cache)
        x = x + y
        return x + self.feed_forward(self.feed_forward_norm(x)), cache


class GPT2(nnx.Module):
    """A decoder that gives the logits of the token after each position."""

    def __init__(self, config: Config, rngs: nnx.Rngs, *, remat: bool = False):
        self.config, self.remat = config, remat
        self.embed = Embedding(config.vocabulary_size, config.width, rngs)
        self.position = Embedding(config.context, config.width, rngs)
        block = functools.partial(Block, config)
        self.layers = stacked(block, config.num_layers, rngs)
        self.norm = LayerNorm(config.width, config.norm_epsilon)
        if not config.has_tied_embeddings:
            self.head = Linear(config.width, config.vocabulary_size, rngs, bias=False)

    def __call__(self, tokens: jax.Array, cache: Cache | None = None) -> Any:
        """From tokens (..., T) to logits (..., T, vocabulary_size) in float32.

        With a cache, the tokens follow those of the cache. It returns the logits, and
        the cache after these tokens.
        """
        check_length(tokens, self.config)
        length, select = positions(tokens, cache)
        x = self.embed(tokens) + self.position(select(jnp.arange(length)))
        x = x.astype(self.layers.attention.query.kernel.dtype)
        is_visible = select(causal(length))
        x, after = apply_stacked(
            self.layers, x, is_visible, cache=cache, remat=self.remat
        )
        tied = self.config.has_tied_embeddings
        kernel = self.embed.embedding[...].T if tied else self.head.kernel[...]
        found = logits(self.norm(x), kernel)
        return found if cache is None else (found, after)
