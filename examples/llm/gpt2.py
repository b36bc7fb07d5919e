"""The decoder of GPT-2: LayerNorm, learned positions, and biases everywhere.

Radford et al. (2019), "Language models are unsupervised multitask learners", section
2.3.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from ._config import Config
from .layers import (
    Attention,
    Embedding,
    FeedForward,
    LayerNorm,
    Linear,
    apply_stacked,
    causal,
    check_length,
    logits,
    stacked,
)


class Block(nnx.Module):
    """Attention and a feed-forward part, each after a normalisation."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.attention_norm = LayerNorm(config.width, config.norm_epsilon)
        self.attention = Attention(config, rngs, bias=True)
        self.feed_forward_norm = LayerNorm(config.width, config.norm_epsilon)
        self.feed_forward = FeedForward(config, rngs, approximate_gelu=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """From and to (..., T, width)."""
        y = self.attention(self.attention_norm(x), causal(x.shape[-2]))
        x = x + y
        return x + self.feed_forward(self.feed_forward_norm(x))


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

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """From tokens (..., T) to logits (..., T, vocabulary_size) in float32."""
        check_length(tokens, self.config)
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[-1]))
        x = x.astype(self.layers.attention.query.kernel.dtype)
        x = self.norm(apply_stacked(self.layers, x, remat=self.remat))
        tied = self.config.has_tied_embeddings
        return logits(x, self.embed.embedding[...].T if tied else self.head.kernel[...])
