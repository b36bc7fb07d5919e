"""A decoder transformer of any size, as shapes and a loss."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dpmp._typing import PyTree


def transformer_shapes(
    *, layers: int, width: int, vocabulary: int, length: int
) -> PyTree:
    """Shapes of the parameters, in float32; those of all layers are stacked."""
    shapes = {
        "embed": (vocabulary, width),
        "position": (length, width),
        "layers": {
            "qkv": (layers, width, 3 * width),
            "out": (layers, width, width),
            "up": (layers, width, 4 * width),
            "down": (layers, 4 * width, width),
            "norms": (layers, 2, width),
        },
        "head": (width, vocabulary),
    }
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def transformer_loss(num_heads: int) -> Callable[[PyTree, jax.Array], jax.Array]:
    """Next-token loss of a decoder that goes through its layers in a loop."""

    def loss_fn(params: PyTree, tokens: jax.Array) -> jax.Array:
        x = params["embed"][tokens] + params["position"]

        def layer(x: jax.Array, p: PyTree) -> tuple[jax.Array, None]:
            x = x + _attend(_normalised(x, p["norms"][0]), p, num_heads)
            hidden = jax.nn.relu(_normalised(x, p["norms"][1]) @ p["up"])
            return x + hidden @ p["down"], None

        x, _ = jax.lax.scan(layer, x, params["layers"])
        logits = (x @ params["head"])[:, :-1].astype(jnp.float32)
        log_probs = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)
        return -jnp.mean(chosen)

    return loss_fn


def _attend(x: jax.Array, p: PyTree, num_heads: int) -> jax.Array:
    heads = (*x.shape[:2], num_heads, x.shape[2] // num_heads)
    q, k, v = (y.reshape(heads) for y in jnp.split(x @ p["qkv"], 3, axis=-1))
    scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32)
    causal = jnp.tri(x.shape[1], dtype=bool)
    weights = jax.nn.softmax(jnp.where(causal, scores / heads[-1] ** 0.5, -1e9))
    mixed = jnp.einsum("bhts,bshd->bthd", weights.astype(x.dtype), v)
    return mixed.reshape(x.shape) @ p["out"]


def _normalised(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + 1e-6)).astype(x.dtype) * scale
