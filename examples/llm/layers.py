"""The layers that the models have in common.

A product of matrices is computed in the dtype of its kernel. Normalisations, positions,
softmax and logits are computed in float32 in any case. The leading axes of activations,
written as `...`, are free: one sequence and a batch of them both work.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ._config import Config

_initial = nnx.initializers.normal(0.02)


class Linear(nnx.Module):
    """Computes x @ kernel, plus a bias if there is one."""

    def __init__(self, num_in: int, num_out: int, rngs: nnx.Rngs, *, bias: bool):
        self.kernel = nnx.Param(_initial(rngs.params(), (num_in, num_out)))
        self.bias = nnx.Param(jnp.zeros(num_out)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """From (..., num_in) to (..., num_out)."""
        y = x.astype(self.kernel.dtype) @ self.kernel[...]
        return y if self.bias is None else y + self.bias[...]


class Embedding(nnx.Module):
    """A vector for each token."""

    def __init__(self, num_rows: int, width: int, rngs: nnx.Rngs):
        self.embedding = nnx.Param(_initial(rngs.params(), (num_rows, width)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """From (...) to (..., width)."""
        return self.embedding[...][tokens]


class RMSNorm(nnx.Module):
    """Divides by the root of the mean square, and multiplies by a scale."""

    def __init__(self, width: int, epsilon: float):
        self.scale = nnx.Param(jnp.ones(width))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """From and to (..., width), in the dtype of x."""
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.epsilon)
        return (y * self.scale.astype(jnp.float32)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Subtracts the mean, divides by the deviation, and applies a scale and a bias."""

    def __init__(self, width: int, epsilon: float):
        self.scale = nnx.Param(jnp.ones(width))
        self.bias = nnx.Param(jnp.zeros(width))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """From and to (..., width), in the dtype of x."""
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, -1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.epsilon)
        y = y * self.scale.astype(jnp.float32) + self.bias.astype(jnp.float32)
        return y.astype(x.dtype)


class Cache(NamedTuple):
    """The keys and values of earlier tokens, with room for those of later ones.

    Attributes:
      keys: (layers, ..., S, heads, head_width), of S tokens at most.
      values: the same.
      num_tokens: (layers,), the number of earlier tokens, for each layer alike.
    """

    keys: jax.Array
    values: jax.Array
    num_tokens: jax.Array

    @classmethod
    def empty(cls, config: Config, shape: tuple[int, ...], dtype: Any) -> "Cache":
        """The cache before the first token; `shape` is (..., S)."""
        heads = config.num_key_value_heads, config.head_width
        zeros = jnp.zeros((config.num_layers, *shape, *heads), dtype)
        return cls(zeros, zeros, jnp.zeros(config.num_layers, jnp.int32))

    def add(self, keys: jax.Array, values: jax.Array) -> "Cache":
        """Adds the next tokens, (..., T, heads, head_width), to a layer's cache."""
        start = self.num_tokens
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=-3)
        return Cache(
            put(self.keys, keys, start),
            put(self.values, values, start),
            start + keys.shape[-3],
        )


class Attention(nnx.Module):
    """Attention, in which groups of query heads may share a key and a value head."""

    def __init__(self, config: Config, rngs: nnx.Rngs, *, bias: bool):
        self.num_heads = config.num_key_value_heads
        all_queries = config.num_heads * config.head_width
        all_keys = config.num_key_value_heads * config.head_width
        self.query = Linear(config.width, all_queries, rngs, bias=bias)
        self.key = Linear(config.width, all_keys, rngs, bias=bias)
        self.value = Linear(config.width, all_keys, rngs, bias=bias)
        self.out = Linear(all_queries, config.width, rngs, bias=bias)
        self.head_width = config.head_width

    def __call__(
        self,
        x: jax.Array,
        is_visible: jax.Array,
        rotate: Callable[[jax.Array], jax.Array] = lambda heads: heads,
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """From and to (..., T, width), with the cache after these tokens.

        `is_visible` says which positions (rows) see which others (columns). With a
        cache, the columns are its positions. `rotate` tells queries and keys their
        positions.
        """
        heads, width = self.num_heads, self.head_width
        # h: key and value heads, g: query heads of one group, d: channels of a head
        q = rotate(self.query(x).reshape(*x.shape[:-1], -1, width))
        k = rotate(self.key(x).reshape(*x.shape[:-1], heads, width))
        v = self.value(x).reshape(*x.shape[:-1], heads, width)
        if cache is not None:
            cache = cache.add(k, v)
            k, v = cache.keys, cache.values
        q = q.reshape(*x.shape[:-1], heads, -1, width)
        weights = _attention_weights(q, k, is_visible).astype(v.dtype)
        mixed = jnp.einsum("...hgts,...shd->...thgd", weights, v)
        return self.out(mixed.reshape(*x.shape[:-1], -1)), cache


def _attention_weights(q: jax.Array, k: jax.Array, is_visible: jax.Array) -> jax.Array:
    """From (..., T, h, g, d) and (..., S, h, d) to (..., h, g, T, S), in float32."""
    scores = jnp.einsum(
        "...thgd,...shd->...hgts", q, k, preferred_element_type=jnp.float32
    )
    # Not minus infinity, which would make NaN of a row that sees nothing.
    hidden = jnp.finfo(jnp.float32).min
    return jax.nn.softmax(jnp.where(is_visible, scores / q.shape[-1] ** 0.5, hidden))


def causal(length: int) -> jax.Array:
    """(T, T), true where a position (row) is not before another (column)."""
    return jnp.tri(length, dtype=bool)


def positions(
    tokens: jax.Array, cache: Cache | None
) -> tuple[int, Callable[[Any], Any]]:
    """The number of positions, and a function that selects the rows of the tokens.

    Without a cache, the tokens have all positions. With one, they have the next ones.
    """
    length = tokens.shape[-1]
    if cache is None:
        return length, lambda rows: rows
    start = cache.num_tokens[0]
    return cache.keys.shape[-3], lambda rows: jax.lax.dynamic_slice_in_dim(
        rows, start, length
    )


class FeedForward(nnx.Module):
    """A projection to more channels, a GELU, and one back."""

    def __init__(self, config: Config, rngs: nnx.Rngs, *, approximate_gelu: bool):
        self.up = Linear(config.width, config.hidden_width, rngs, bias=True)
        self.down = Linear(config.hidden_width, config.width, rngs, bias=True)
        self.approximate = approximate_gelu

    def __call__(self, x: jax.Array) -> jax.Array:
        """From and to (..., width)."""
        return self.down(jax.nn.gelu(self.up(x), approximate=self.approximate))


def check_length(tokens: jax.Array, config: Config) -> None:
    """Raises ValueError if the sequences are longer than the model can take."""
    if tokens.shape[-1] > config.context:
        raise ValueError(
            f"The model takes at most {config.context} tokens; got {tokens.shape[-1]}. "
            "Cut the text, or split it into several examples."
        )


def stacked(make: Callable[[nnx.Rngs], Any], num_layers: int, rngs: nnx.Rngs) -> Any:
    """Layers as one module, whose parameters have a leading axis of layers."""
    return nnx.split_rngs(splits=num_layers)(nnx.vmap(make))(rngs)


def apply_stacked(
    layers: Any, x: jax.Array, *inputs: Any, cache: Cache | None = None, remat: bool
) -> tuple[jax.Array, Cache | None]:
    """Applies the layers of `stacked` one after another, in a loop.

    Each layer maps x, its part of the cache and the inputs to a new x and new cache.
    Compilation takes as long as for one layer. With `remat`, the backward pass computes
    the activations inside a layer again instead of keeping them.
    """
    graphdef, params = nnx.split(layers)

    def step(x: jax.Array, of_layer: Any) -> tuple[jax.Array, Cache | None]:
        layer, cache = of_layer
        return nnx.merge(graphdef, layer)(x, cache, *inputs)

    step = jax.checkpoint(step) if remat else step
    return jax.lax.scan(step, x, (params, cache))


def logits(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """From (..., width) and (width, V) to (..., V) in float32."""
    return jnp.matmul(
        x.astype(kernel.dtype), kernel, preferred_element_type=jnp.float32
    )
