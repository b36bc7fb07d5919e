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
    LayerNorm,
    Linear,
    apply_stacked,
    check_length,
    logits,
    stacked,
)


class FeedForward(nnx.Module):
    """A projection to more channels, a GELU, and one back."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.up = Linear(config.width, config.hidden_width, rngs, bias=True)
        self.down = Linear(config.hidden_width, config.width, rngs, bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """From and to (..., width)."""
        return self.down(jax.nn.gelu(self.up(x), approximate=True))


class Block(nnx.Module):
    """Attention and a feed-forward part, each after a normalisation."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.attention_norm = LayerNorm(config.width, config.norm_epsilon)
        self.attention = Attention(config, rngs, bias=True)
        self.feed_forward_norm = LayerNorm(config.width, config.norm_epsilon)
        self.feed_forward = FeedForward(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """From and to (..., T, width)."""
        x = x + self.attention(self.attention_norm(x))
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
