"""A zoo of small models, for tests that compare implementations."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Model(NamedTuple):
    """A loss and what it takes.

    Attributes:
      name: for test ids.
      init: `init(dtype)` gives the parameters.
      loss: `loss(params, batch)` is the mean loss of a batch, in float32.
      make_batch: `make_batch(seed, size)` gives a batch with a leading example axis.
    """

    name: str
    init: Callable[[Any], Any]
    loss: Callable[[Any, Any], jax.Array]
    make_batch: Callable[[int, int], Any]


_NUM_CLASSES = 3
_VOCABULARY, _LENGTH, _WIDTH, _HEADS = 11, 5, 8, 2


def per_example_grads(model: Model, params: Any, batch: Any) -> Any:
    """The gradients as jax computes them: a tree of arrays (B, ...)."""
    return _per_example_grad_fn(model)(params, batch)


@functools.cache
def _per_example_grad_fn(model: Model) -> Callable[[Any, Any], Any]:
    def loss(params, example):
        return model.loss(params, jax.tree.map(lambda x: x[None], example))

    return jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    scale = 1 / np.sqrt(np.prod(shape[:-1]))
    return jnp.asarray(rng.normal(0, scale, shape), jnp.float32).astype(dtype)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(log_probs, labels[..., None], axis=-1))


def _init_mlp(dtype: Any) -> Any:
    rng = np.random.default_rng(0)
    return {
        "hidden": {"w": normal(rng, (6, 8), dtype), "b": jnp.zeros(8, dtype)},
        "out": {"w": normal(rng, (8, _NUM_CLASSES), dtype), "b": jnp.zeros(3, dtype)},
    }


def _mlp_loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"].astype(params["hidden"]["w"].dtype)
    x = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return cross_entropy(x @ params["out"]["w"] + params["out"]["b"], batch["label"])


def _mlp_batch(seed: int, size: int) -> Any:
    rng = np.random.default_rng(seed)
    return {
        "x": jnp.asarray(rng.normal(size=(size, 6)), jnp.float32),
        "label": jnp.asarray(rng.integers(_NUM_CLASSES, size=size), jnp.int32),
    }


def _init_conv(dtype: Any) -> Any:
    rng = np.random.default_rng(1)
    return {
        "kernel": normal(rng, (3, 3, 2, 4), dtype),
        "bias": jnp.zeros(4, dtype),
        "out": normal(rng, (4, _NUM_CLASSES), dtype),
    }


def _conv_loss(params: Any, batch: Any) -> jax.Array:
    x = jax.lax.conv_general_dilated(
        batch["image"].astype(params["kernel"].dtype),
        params["kernel"],
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    x = jax.nn.relu(x + params["bias"]).mean((1, 2))
    return cross_entropy(x @ params["out"], batch["label"])


def _conv_batch(seed: int, size: int) -> Any:
    rng = np.random.default_rng(seed)
    return {
        "image": jnp.asarray(rng.normal(size=(size, 6, 6, 2)), jnp.float32),
        "label": jnp.asarray(rng.integers(_NUM_CLASSES, size=size), jnp.int32),
    }


def _init_transformer(dtype: Any) -> Any:
    rng = np.random.default_rng(2)
    return {
        "embedding": normal(rng, (_VOCABULARY, _WIDTH), dtype),
        "position": normal(rng, (_LENGTH, _WIDTH), dtype),
        "scale": jnp.ones((2, _WIDTH), dtype),
        "qkv": normal(rng, (_WIDTH, 3 * _WIDTH), dtype),
        "proj": normal(rng, (_WIDTH, _WIDTH), dtype),
        "up": normal(rng, (_WIDTH, 2 * _WIDTH), dtype),
        "down": normal(rng, (2 * _WIDTH, _WIDTH), dtype),
    }


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + 1e-6)).astype(x.dtype) * scale


def attention(x: jax.Array, qkv: jax.Array) -> jax.Array:
    batch, length, width = x.shape
    q, k, v = jnp.split((x @ qkv).reshape(batch, length, _HEADS, -1), 3, axis=-1)
    scores = jnp.einsum("bihd,bjhd->bhij", q, k, preferred_element_type=jnp.float32)
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9)).astype(x.dtype)
    return jnp.einsum("bhij,bjhd->bihd", weights, v).reshape(batch, length, width)


def _transformer_loss(params: Any, batch: Any) -> jax.Array:
    tokens, targets = batch[:, :-1], batch[:, 1:]
    x = params["embedding"][tokens] + params["position"]
    attended = attention(rms_norm(x, params["scale"][0]), params["qkv"])
    x = x + attended @ params["proj"]
    hidden = jax.nn.gelu(rms_norm(x, params["scale"][1]) @ params["up"])
    x = x + hidden @ params["down"]
    return cross_entropy(x @ params["embedding"].T, targets)


def _transformer_batch(seed: int, size: int) -> Any:
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(_VOCABULARY, size=(size, _LENGTH + 1)), jnp.int32)


MLP = Model("mlp", _init_mlp, _mlp_loss, _mlp_batch)
CONV = Model("conv", _init_conv, _conv_loss, _conv_batch)
TRANSFORMER = Model(
    "transformer", _init_transformer, _transformer_loss, _transformer_batch
)
ZOO = (MLP, CONV, TRANSFORMER)
