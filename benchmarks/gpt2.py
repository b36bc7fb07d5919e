"""GPT-2 as people write it in plain JAX: three sizes, random weights.

Token embeddings are tied to the head, positions are learned, layers are a list (or a
loop, which compiles faster). Softmax, normalisation and loss are in float32, everything
else is in the dtype of the parameters.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Shape(NamedTuple):
    """The size of a model.

    Attributes:
      depth: number of layers.
      width: of the residual stream.
      heads: of attention.
      vocabulary: number of tokens.
      positions: for which there are embeddings.
    """

    depth: int
    width: int
    heads: int
    vocabulary: int = 50257
    positions: int = 1024


SHAPES = {
    "small": Shape(12, 768, 12),
    "medium": Shape(24, 1024, 16),
    "large": Shape(36, 1280, 20),
}
TINY = Shape(2, 16, 2, vocabulary=40, positions=16)


def init(shape: Shape, key: jax.Array, *, scan: bool = False) -> Any:
    """Random float32 parameters: of layers in a list, or stacked for a loop."""
    keys = iter(jax.random.split(key, 4 * shape.depth + 2))

    def normal(*dims: int) -> jax.Array:
        return 0.02 * jax.random.normal(next(keys), dims)

    def layer_norm() -> dict[str, jax.Array]:
        return {"scale": jnp.ones(shape.width), "bias": jnp.zeros(shape.width)}

    def dense(n_in: int, n_out: int) -> dict[str, jax.Array]:
        return {"w": normal(n_in, n_out), "b": jnp.zeros(n_out)}

    width = shape.width
    blocks: Any = [
        {
            "norm_1": layer_norm(),
            "qkv": dense(width, 3 * width),
            "out": dense(width, width),
            "norm_2": layer_norm(),
            "up": dense(width, 4 * width),
            "down": dense(4 * width, width),
        }
        for _ in range(shape.depth)
    ]
    return {
        "tokens": normal(shape.vocabulary, width),
        "positions": normal(shape.positions, width),
        "blocks": jax.tree.map(lambda *xs: jnp.stack(xs), *blocks) if scan else blocks,
        "norm": layer_norm(),
    }


def loss_fn(shape: Shape, *, scan: bool = False) -> Callable[[Any, Any], jax.Array]:
    """The mean loss of the next token: a function of (params, tokens of (B, T))."""

    def apply_block(x: jax.Array, p: Any) -> jax.Array:
        x = x + _attend(_layer_norm(x, p["norm_1"]), p, shape.heads)
        hidden = jax.nn.gelu(_dense(_layer_norm(x, p["norm_2"]), p["up"]))
        return x + _dense(hidden, p["down"])

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["tokens"][tokens] + params["positions"][: tokens.shape[1]]
        if scan:
            x, _ = jax.lax.scan(
                lambda x, p: (apply_block(x, p), None), x, params["blocks"]
            )
        else:
            x = functools.reduce(apply_block, params["blocks"], x)
        logits = _layer_norm(x, params["norm"]) @ params["tokens"].T
        log_probs = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
        labels = tokens[:, 1:, None]
        return -jnp.mean(jnp.take_along_axis(log_probs, labels, axis=-1))

    return loss


def _dense(x: jax.Array, p: Any) -> jax.Array:
    return x @ p["w"] + p["b"]


def _layer_norm(x: jax.Array, p: Any) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide -= jnp.mean(wide, axis=-1, keepdims=True)
    wide *= jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * p["scale"] + p["bias"]


def _attend(x: jax.Array, p: Any, heads: int) -> jax.Array:
    length, width = x.shape[1:]
    q, k, v = (
        y.reshape(-1, length, heads, width // heads)
        for y in jnp.split(_dense(x, p["qkv"]), 3, axis=-1)
    )
    scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32)
    scores = scores / math.sqrt(width // heads)
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9)).astype(x.dtype)
    mixed = jnp.einsum("bhts,bshd->bthd", weights, v)
    return _dense(mixed.reshape(x.shape), p["out"])
