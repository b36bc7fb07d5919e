"""Models that do more with parameters than to multiply by them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._parts import NUM_CLASSES, cross_entropy, init_fn, model, normal, vectors


@model(
    "nested_loops",
    vectors,
    3,
    layers={"w": (2, 3, 6, 6), "b": np.zeros((2, 6))},
    shared=(6, 6),
    out=(6, NUM_CLASSES),
)
def _nested_loss(params: Any, batch: Any) -> jax.Array:
    """A loop in a loop, that goes through the weights of the outer one."""
    x = batch["x"].astype(params["out"].dtype)

    def inner(x, w):
        return jnp.tanh(x @ w + x @ params["shared"]), None

    def outer(carry, layer):
        x, shared = carry
        x, _ = jax.lax.scan(inner, x, layer["w"], reverse=True)
        return (x @ shared + layer["b"], shared), None

    (x, _), _ = jax.lax.scan(outer, (x, params["shared"]), params["layers"])
    return cross_entropy(x @ params["out"], batch["label"])


@model(
    "weight_norm",
    vectors,
    6,
    direction=(6, 8),
    size=np.ones(8),
    shift=np.zeros(8),
    out=(8, NUM_CLASSES),
)
def _weight_norm_loss(params: Any, batch: Any) -> jax.Array:
    wide = params["direction"].astype(jnp.float32)
    unit = wide * jax.lax.rsqrt(jnp.sum(jnp.square(wide), axis=0, keepdims=True))
    w = unit.astype(params["size"].dtype) * params["size"]
    x = batch["x"].astype(w.dtype) @ w
    # A scale that is stored as its difference to one.
    x = jnp.tanh(x) * (1 + params["shift"])
    return cross_entropy(x @ params["out"], batch["label"])


@model("lora", vectors, 7, a=(6, 2), b=(2, 8), c=(8, 2), d=(2, NUM_CLASSES))
def _lora_loss(params: Any, batch: Any) -> jax.Array:
    rng = np.random.default_rng(8)
    dtype = params["a"].dtype
    frozen = normal(rng, (6, 8), dtype), normal(rng, (8, NUM_CLASSES), dtype)
    x = batch["x"].astype(dtype)
    x = jnp.tanh(x @ frozen[0] + x @ params["a"] @ params["b"])  # two products of data
    merged = frozen[1] + params["c"] @ params["d"]  # one of parameters
    return cross_entropy(x @ merged, batch["label"])


_init_shared = init_fn(
    9, w=(6, 6), halves=(6, 12), unused=np.ones(3), out=(6, NUM_CLASSES)
)


@model("shared", vectors, init=_init_shared)
def _shared_loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"].astype(params["w"].dtype)
    x = jnp.tanh(x @ params["w"]) @ params["w"] + x @ params["w"].T
    left, right = jnp.split(params["halves"], 2, axis=1)
    x = jnp.tanh(x @ left) + x @ right
    return cross_entropy(x @ params["out"], batch["label"])


@model("regularised", vectors, init=_init_shared)
def _regularised_loss(params: Any, batch: Any) -> jax.Array:
    squares = (jnp.sum(jnp.square(w.astype(jnp.float32))) for w in params.values())
    return _shared_loss(params, batch) + 0.1 * sum(squares)


@model("control_flow", vectors, init=_init_shared)
def _control_flow_loss(params: Any, batch: Any) -> jax.Array:
    """Branches, custom rules, loops of unknown length, and indices that are data."""
    w = params["w"]
    x = batch["x"].astype(w.dtype)
    size = jax.lax.while_loop(
        lambda n: n < 3, lambda n: n + jnp.abs(w[0, 0]) + 1, jnp.zeros((), w.dtype)
    )
    x = x * jax.lax.stop_gradient(size)
    x = jax.lax.cond(x.sum() > 0, lambda x, w: x @ w, lambda x, w: x - w[0], x, w)
    x = _doubled(x, params["halves"][:, :6])
    x = x + w[batch["label"]] + jax.lax.dynamic_slice(w, (batch["label"][0], 0), (1, 6))
    return cross_entropy(jax.jit(jnp.matmul)(x, params["out"]), batch["label"])


@jax.custom_vjp
def _doubled(x, w):
    return x @ w


_doubled.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda saved, g: (g @ saved[1].T, jnp.asarray(2, g.dtype) * (saved[0].T @ g)),
)
