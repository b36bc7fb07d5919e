"""A decoder transformer of any size, as shapes and a loss."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from dpmp._typing import PyTree


def transformer(
    *, layers: int, width: int, num_heads: int, vocabulary: int, length: int
) -> tuple[PyTree, Callable[[PyTree, jax.Array], jax.Array]]:
    """The shapes of the parameters, and the next-token loss.

    The parameters of all layers are stacked, and the loss goes through them in a loop.
    """
    if width % num_heads:
        raise ValueError(f"{num_heads} heads must divide the width, {width}.")

    def shape(*axes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(axes, jnp.float32)

    params = {
        "embed": shape(vocabulary, width),
        "position": shape(length, width),
        "layers": {
            "qkv": shape(layers, width, num_heads, 3, width // num_heads),
            "out": shape(layers, width, width),
            "up": shape(layers, width, 4 * width),
            "down": shape(layers, 4 * width, width),
            "norms": shape(layers, 2, width),
        },
        "head": shape(width, vocabulary),
    }

    def loss_fn(params: PyTree, tokens: jax.Array) -> jax.Array:
        x = params["embed"][tokens] + params["position"]
        x, _ = jax.lax.scan(lambda x, p: (_layer(x, p), None), x, params["layers"])
        logits = (x @ params["head"])[:, :-1].astype(jnp.float32)
        losses = optax.losses.softmax_cross_entropy_with_integer_labels
        return jnp.mean(losses(logits, tokens[:, 1:]))

    return params, loss_fn


def _layer(x: jax.Array, p: PyTree) -> jax.Array:
    q, k, v = jnp.einsum("bti,ihco->cbtho", _normalised(x, p["norms"][0]), p["qkv"])
    scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32)
    causal = jnp.tri(x.shape[1], dtype=bool)
    weights = jax.nn.softmax(jnp.where(causal, scores / q.shape[-1] ** 0.5, -1e9))
    mixed = jnp.einsum("bhts,bshd->bthd", weights.astype(x.dtype), v)
    x = x + mixed.reshape(x.shape) @ p["out"]
    hidden = jax.nn.relu(_normalised(x, p["norms"][1]) @ p["up"])
    return x + hidden @ p["down"]


def _normalised(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + 1e-6)).astype(x.dtype) * scale
