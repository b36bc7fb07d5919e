"""The models that the benchmarks run: losses on plain pytrees, any float dtype."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Task(NamedTuple):
    """A loss, its parameters, and a batch."""

    loss_fn: Callable[[Any, Any], jax.Array]
    params: Any
    batch: Any


def mlp(dtype: Any, batch_size: int = 64) -> Task:
    """784-512-512-10: per-example gradients are all there is to compute."""
    sizes = (784, 512, 512, 10)
    keys = jax.random.split(jax.random.key(0), len(sizes))
    params = [
        {"w": _normal(key, (n_in, n_out), dtype), "b": jnp.zeros(n_out, dtype)}
        for key, n_in, n_out in zip(keys[1:], sizes, sizes[1:], strict=False)
    ]

    def loss_fn(params, batch):
        *hidden, last = params
        x = batch["x"]
        for layer in hidden:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        return _cross_entropy(x @ last["w"] + last["b"], batch["label"])

    x = jax.random.normal(keys[0], (batch_size, sizes[0])).astype(dtype)
    return Task(loss_fn, params, {"x": x, "label": jnp.arange(batch_size) % 10})


def transformer(
    dtype: Any,
    batch_size: int = 32,
    *,
    length: int = 64,
    width: int = 128,
    depth: int = 4,
    heads: int = 4,
    vocabulary: int = 256,
) -> Task:
    """A decoder with float32 softmax, normalisation and loss."""
    keys = iter(jax.random.split(jax.random.key(0), 4 * depth + 4))

    def block():
        return {
            "qkv": _normal(next(keys), (width, 3 * width), dtype),
            "out": _normal(next(keys), (width, width), dtype),
            "up": _normal(next(keys), (width, 4 * width), dtype),
            "down": _normal(next(keys), (4 * width, width), dtype),
            "norms": jnp.ones((2, width), dtype),
        }

    params = {
        "embed": _normal(next(keys), (vocabulary, width), dtype),
        "position": _normal(next(keys), (length, width), dtype),
        "blocks": [block() for _ in range(depth)],
        "head": _normal(next(keys), (width, vocabulary), dtype),
    }
    causal = jnp.tril(jnp.ones((length, length), bool))

    def attend(x, p):
        q, k, v = (
            y.reshape(*y.shape[:2], heads, width // heads)
            for y in jnp.split(x @ p["qkv"], 3, axis=-1)
        )
        scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32)
        scores = jnp.where(causal, scores / math.sqrt(width // heads), -1e9)
        weights = jax.nn.softmax(scores).astype(x.dtype)
        return jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape) @ p["out"]

    def loss_fn(params, batch):
        x = params["embed"][batch["tokens"]] + params["position"]
        for p in params["blocks"]:
            x = x + attend(_rms_norm(x, p["norms"][0]), p)
            x = x + jax.nn.gelu(_rms_norm(x, p["norms"][1]) @ p["up"]) @ p["down"]
        return _cross_entropy((x @ params["head"])[:, :-1], batch["tokens"][:, 1:])

    shape = (batch_size, length)
    tokens = jax.random.randint(next(keys), shape, 0, vocabulary)
    return Task(loss_fn, params, {"tokens": tokens})


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return (jax.random.normal(key, shape) / math.sqrt(shape[0])).astype(dtype)


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    return wide.astype(x.dtype) * scale


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(log_probs, labels[..., None], axis=-1))
