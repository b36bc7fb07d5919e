"""The decoder of the Llama family: RMSNorm, rotary positions, gated feed-forward.

Touvron et al. (2023), https://arxiv.org/abs/2302.13971, section 2.2.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ._config import Config
from .layers import (
    Attention,
    Cache,
    Embedding,
    Linear,
    RMSNorm,
    apply_stacked,
    causal,
    check_length,
    logits,
    positions,
    stacked,
)


class Rotation:
    """Rotary positions: turns pairs of channels by angles that grow with the position.

    The pairs are channel i of the first half of a head with channel i of the second.
    Su et al. (2021), https://arxiv.org/abs/2104.09864, section 3.2.2.
    """

    def __init__(
        self,
        length: int,
        head_width: int,
        base: float,
        select: Callable[[Any], Any] = lambda rows: rows,
    ):
        pairs = np.arange(0, head_width, 2, dtype=np.float32)
        frequencies = np.float32(base) ** (-pairs / np.float32(head_width))
        angles = np.arange(length, dtype=np.float32)[:, None] * frequencies
        # (T, 1, head_width / 2): the same for all heads
        self.cos, self.sin = (
            select(turn(angles)[:, None]) for turn in (np.cos, np.sin)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """From and to (..., T, heads, head_width)."""
        left, right = jnp.split(x.astype(jnp.float32), 2, -1)
        turned = (
            left * self.cos - right * self.sin,
            right * self.cos + left * self.sin,
        )
        return jnp.concatenate(turned, -1).astype(x.dtype)


class GatedFeedForward(nnx.Module):
    """Two projections, one of which gates the other, and one back."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.gate = Linear(config.width, config.hidden_width, rngs, bias=False)
        self.up = Linear(config.width, config.hidden_width, rngs, bias=False)
        self.down = Linear(config.hidden_width, config.width, rngs, bias=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        """From and to (..., width)."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """Attention and a feed-forward part, each after a normalisation."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.width, config.norm_epsilon)
        self.attention = Attention(config, rngs, bias=False)
        self.feed_forward_norm = RMSNorm(config.width, config.norm_epsilon)
        self.feed_forward = GatedFeedForward(config, rngs)

    def __call__(
        self,
        x: jax.Array,
        cache: Cache | None,
        is_visible: jax.Array,
        rotation: Rotation,
    ) -> tuple[jax.Array, Cache | None]:
        """From and to (..., T, width), with the cache after these tokens."""
        y = self.attention_norm(x)
        y, cache = self.attention(y, is_visible, rotation, cache)
        x = x + y
        return x + self.feed_forward(self.feed_forward_norm(x)), cache


class Llama(nnx.Module):
    """A decoder that gives the logits of the token after each position."""

    def __init__(self, config: Config, rngs: nnx.Rngs, *, remat: bool = False):
        self.config, self.remat = config, remat
        self.embed = Embedding(config.vocabulary_size, config.width, rngs)
        block = functools.partial(Block, config)
        self.layers = stacked(block, config.num_layers, rngs)
        self.norm = RMSNorm(config.width, config.norm_epsilon)
        if not config.has_tied_embeddings:
            self.head = Linear(config.width, config.vocabulary_size, rngs, bias=False)

    def __call__(self, tokens: jax.Array, cache: Cache | None = None) -> Any:
        """From tokens (..., T) to logits (..., T, vocabulary_size) in float32.

        With a cache, the tokens follow those of the cache. It returns the logits, and
        the cache after these tokens.
        """
        check_length(tokens, self.config)
        config = self.config
        length, select = positions(tokens, cache)
        rotation = Rotation(length, config.head_width, config.rope_base, select)
        x = self.embed(tokens).astype(self.layers.attention.query.kernel.dtype)
        inputs = select(causal(length)), rotation
        x, after = apply_stacked(self.layers, x, *inputs, cache=cache, remat=self.remat)
        tied = config.has_tied_embeddings
        kernel = self.embed.embedding[...].T if tied else self.head.kernel[...]
        found = logits(self.norm(x), kernel)
        return found if cache is None else (found, after)
