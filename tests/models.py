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


NUM_CLASSES = 3
VOCABULARY, LENGTH, WIDTH, HEADS = 11, 5, 8, 2


def per_example_grads(model: Model, params: Any, batch: Any) -> Any:
    """The gradients as jax computes them: a tree of arrays (B, ...)."""
    return per_example_losses_and_grads(model, params, batch)[1]


def per_example_losses_and_grads(model: Model, params: Any, batch: Any) -> Any:
    """The losses, (B,), and the gradients, from one program of jax."""
    return _per_example_fn(model)(params, batch)


@functools.cache
def _per_example_fn(model: Model) -> Callable[[Any, Any], Any]:
    def loss(params, example):
        return model.loss(params, jax.tree.map(lambda x: x[None], example))

    return jax.jit(jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0)))


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    scale = 1 / np.sqrt(np.prod(shape[:-1]))
    # Converted by NumPy: every conversion by jax is one more program to compile.
    return jnp.asarray(np.float32(rng.normal(0, scale, shape)).astype(dtype))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(log_probs, labels[..., None], axis=-1))


def init_fn(seed: int, shapes: Any) -> Callable[[Any], Any]:
    """An `init`: normal arrays for tuples in dictionaries, and arrays as given."""

    def make(rng: np.random.Generator, shape: Any, dtype: Any) -> Any:
        if isinstance(shape, dict):
            return {name: make(rng, x, dtype) for name, x in shape.items()}
        if isinstance(shape, tuple):
            return normal(rng, shape, dtype)
        return jnp.asarray(shape, dtype)

    return lambda dtype: make(np.random.default_rng(seed), shapes, dtype)


def labelled(name: str, *shape: int) -> Callable[[int, int], Any]:
    """A `make_batch` of normal inputs of a shape, with labels."""

    def make_batch(seed: int, size: int) -> Any:
        rng = np.random.default_rng(seed)
        return {
            name: jnp.asarray(rng.normal(size=(size, *shape)), jnp.float32),
            "label": jnp.asarray(rng.integers(NUM_CLASSES, size=size), jnp.int32),
        }

    return make_batch


def token_batch(seed: int, size: int) -> Any:
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(VOCABULARY, size=(size, LENGTH + 1)), jnp.int32)


def _mlp_loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"].astype(params["hidden"]["w"].dtype)
    x = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return cross_entropy(x @ params["out"]["w"] + params["out"]["b"], batch["label"])


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


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + 1e-6)).astype(x.dtype) * scale


def attention(x: jax.Array, qkv: jax.Array) -> jax.Array:
    batch, length, width = x.shape
    q, k, v = jnp.split((x @ qkv).reshape(batch, length, HEADS, -1), 3, axis=-1)
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


MLP = Model(
    "mlp",
    init_fn(
        0,
        {
            "hidden": {"w": (6, 8), "b": np.zeros(8)},
            "out": {"w": (8, NUM_CLASSES), "b": np.zeros(NUM_CLASSES)},
        },
    ),
    _mlp_loss,
    labelled("x", 6),
)
CONV = Model(
    "conv",
    init_fn(1, {"kernel": (3, 3, 2, 4), "bias": np.zeros(4), "out": (4, NUM_CLASSES)}),
    _conv_loss,
    labelled("image", 6, 6, 2),
)
TRANSFORMER = Model(
    "transformer",
    init_fn(
        2,
        {
            "embedding": (VOCABULARY, WIDTH),
            "position": (LENGTH, WIDTH),
            "scale": np.ones((2, WIDTH)),
            "qkv": (WIDTH, 3 * WIDTH),
            "proj": (WIDTH, WIDTH),
            "up": (WIDTH, 2 * WIDTH),
            "down": (2 * WIDTH, WIDTH),
        },
    ),
    _transformer_loss,
    token_batch,
)
ZOO = (MLP, CONV, TRANSFORMER)
