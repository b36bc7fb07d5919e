"""Models of hundreds of arrays, as people write them in Flax: losses of one batch."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from benchmarks.models import Task


class _Block(nn.Module):
    """One layer of a transformer: 12 arrays."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(x[..., 0])
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, use_bias=False)(
            y, mask=mask
        )
        y = nn.LayerNorm()(x)
        y = nn.gelu(nn.Dense(4 * x.shape[-1])(y))
        return x + nn.Dense(x.shape[-1])(y)


class _Transformer(nn.Module):
    """A decoder that predicts the next token."""

    depth: int
    width: int
    vocabulary: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocabulary, self.width)
        position = nn.Embed(tokens.shape[1], self.width)
        x = embed(tokens) + position(jnp.arange(tokens.shape[1]))
        for _ in range(self.depth):
            x = _Block(4)(x)
        return nn.Dense(self.vocabulary)(nn.LayerNorm()(x))


def transformer(
    dtype: Any, batch_size: int = 32, *, depth: int = 12, width: int = 128
) -> Task:
    """A Linen decoder of 12 arrays a layer, and six more."""
    vocabulary, length = 256, 32
    model = _Transformer(depth, width, vocabulary)
    shape = (batch_size, length)
    tokens = jax.random.randint(jax.random.key(0), shape, 0, vocabulary)

    def loss_fn(params, batch):
        logits: Any = model.apply(params, batch["tokens"])
        logits = logits[:, :-1].astype(jnp.float32)
        labels = batch["tokens"][:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return Task(loss_fn, _init(model, tokens, dtype), {"tokens": tokens})


class _ResidualBlock(nn.Module):
    """Two normalised convolutions and what goes past them: 8 to 10 arrays."""

    channels: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = x
        for _ in range(2):
            y = nn.silu(nn.GroupNorm(8)(y))
            y = nn.Conv(self.channels, (3, 3))(y)
        if x.shape[-1] != self.channels:
            x = nn.Conv(self.channels, (1, 1))(x)
        return x + y


class _UNet(nn.Module):
    """Down, and up again with what was seen on the way."""

    channels: tuple[int, ...]
    blocks: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        num_channels = x.shape[-1]
        x = nn.Conv(self.channels[0], (3, 3))(x)
        skipped = []
        for channels in self.channels:
            for _ in range(self.blocks):
                x = _ResidualBlock(channels)(x)
            skipped.append(x)
            x = nn.Conv(channels, (3, 3), strides=(2, 2))(x)
        for channels, skip in zip(self.channels[::-1], skipped[::-1], strict=True):
            x = nn.ConvTranspose(channels, (2, 2), strides=(2, 2))(x)
            x = jnp.concatenate([x, skip], axis=-1)
            for _ in range(self.blocks):
                x = _ResidualBlock(channels)(x)
        return nn.Conv(num_channels, (3, 3))(x)


def unet(dtype: Any, batch_size: int = 8) -> Task:
    """A Linen U-Net of about 200 arrays that removes noise from images of 16 x 16."""
    model = _UNet((16, 32, 64), 4)
    image = jax.random.normal(jax.random.key(0), (batch_size, 16, 16, 3)).astype(dtype)

    def loss_fn(params, batch):
        image: Any = model.apply(params, batch["image"])
        error = image - batch["image"]
        return jnp.square(error.astype(jnp.float32)).mean()

    return Task(loss_fn, _init(model, image, dtype), {"image": image})


def _init(model: nn.Module, inputs: jax.Array, dtype: Any) -> Any:
    params = jax.jit(model.init)(jax.random.key(0), inputs[:1])
    return jax.tree.map(lambda x: x.astype(dtype), params)
