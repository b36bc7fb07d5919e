"""More of the zoo: what programs do with parameters besides multiplying by them."""

from typing import Any

import jax
import jax.numpy as jnp
import models
import numpy as np
from models import (
    HEADS,
    LENGTH,
    NUM_CLASSES,
    VOCABULARY,
    WIDTH,
    Model,
    cross_entropy,
    init_fn,
    labelled,
    normal,
    rms_norm,
)

_DEPTH = 3
_vectors, _sequences = labelled("x", 6), labelled("x", LENGTH, 6)
_images = labelled("image", 8, 8, 4)


# Convolutions: strided, dilated, grouped, depthwise; normalisation over groups.


_init_group_norm_cnn = init_fn(
    0,
    {
        "stem": (3, 3, 4, 8),
        "depthwise": (3, 3, 1, 16),
        "grouped": (3, 2, 8, 4),
        "transposed": (2, 2, 4, 6),
        "scale": np.ones(8),
        "bias": np.zeros(8),
        "out": (6, NUM_CLASSES),
    },
)


def _conv(x: jax.Array, kernel: jax.Array, **kwargs: Any) -> jax.Array:
    options = {"window_strides": (1, 1), "padding": "SAME", **kwargs}
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, dimension_numbers=numbers, **options)


def _group_norm_cnn_loss(params: Any, batch: Any) -> jax.Array:
    x = batch["image"].astype(params["stem"].dtype)
    x = _conv(x, params["stem"], window_strides=(2, 1))
    groups = x.astype(jnp.float32).reshape(*x.shape[:3], 2, 4)
    groups -= groups.mean((1, 2, 4), keepdims=True)
    groups *= jax.lax.rsqrt(jnp.square(groups).mean((1, 2, 4), keepdims=True) + 1e-3)
    x = groups.reshape(x.shape).astype(x.dtype) * params["scale"] + params["bias"]
    x = _conv(jax.nn.relu(x), params["depthwise"], feature_group_count=8)
    x = _conv(
        jnp.tanh(x),
        params["grouped"],
        feature_group_count=2,
        rhs_dilation=(1, 2),
        padding=[(0, 1), (1, 2)],
    )
    x = _conv(x, params["transposed"], lhs_dilation=(2, 1), padding=[(1, 0)] * 2)
    return cross_entropy(jnp.tanh(x).mean((1, 2)) @ params["out"], batch["label"])


# Transformers, in ways to write the loop over layers.


def _init_decoder(dtype: Any) -> Any:
    rng = np.random.default_rng(1)

    def layers(*shape: int) -> jax.Array:
        # Twice as large as those of one layer; exact in any dtype.
        return jnp.asarray(
            np.asarray(normal(rng, (_DEPTH, *shape), dtype)) * np.asarray(2, dtype)
        )

    return {
        "embedding": normal(rng, (VOCABULARY, WIDTH), dtype),
        "position": normal(rng, (LENGTH, WIDTH), dtype),
        "layers": {
            "scale": jnp.ones((_DEPTH, 2, WIDTH), dtype),
            "qkv": layers(WIDTH, 3 * WIDTH),
            "proj": layers(WIDTH, WIDTH),
            "up": layers(WIDTH, 2 * WIDTH),
            "up_bias": jnp.zeros((_DEPTH, 2 * WIDTH), dtype),
            "down": layers(2 * WIDTH, WIDTH),
        },
        "shared": normal(rng, (WIDTH, WIDTH), dtype),
        "head": normal(rng, (WIDTH, VOCABULARY), dtype),
    }


def _layer(x: jax.Array, layer: Any, shared: jax.Array) -> jax.Array:
    attended = models.attention(rms_norm(x, layer["scale"][0]), layer["qkv"])
    x = x + attended @ layer["proj"] + jnp.tanh(x @ shared)
    hidden = rms_norm(x, layer["scale"][1]) @ layer["up"] + layer["up_bias"]
    return x + jax.nn.gelu(hidden) @ layer["down"]


def _make_decoder(name: str, *, tied: bool, scan: bool, remat: bool) -> Model:
    def loss(params: Any, batch: Any) -> jax.Array:
        tokens, targets = batch[:, :-1], batch[:, 1:]
        x = params["embedding"][tokens] + params["position"]
        layer_fn = jax.checkpoint(_layer) if remat else _layer

        def body(x, layer):
            return layer_fn(x, layer, params["shared"]), None

        if scan:
            x, _ = jax.lax.scan(body, x, params["layers"])
        else:
            for i in range(_DEPTH):
                layer = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
                x, _ = body(x, layer)
        head = params["embedding"].T if tied else params["head"]
        return cross_entropy(x @ head, targets)

    return Model(name, _init_decoder, loss, models.token_batch)


# Recurrent networks: parameters that every iteration sees.


_init_recurrent = init_fn(
    2,
    {
        "cell": {
            "input": (6, 4 * WIDTH),
            "hidden": (WIDTH, 4 * WIDTH),
            "bias": np.zeros(4 * WIDTH),
        },
        "start": (1, WIDTH),
        "out": (WIDTH, NUM_CLASSES),
    },
)


def _lstm_cell(cell: Any, state: Any, x: jax.Array) -> Any:
    hidden, memory = state
    gates = x @ cell["input"] + hidden @ cell["hidden"] + cell["bias"]
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    memory = jax.nn.sigmoid(f) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(memory), memory


def _gru_cell(cell: Any, state: Any, x: jax.Array) -> Any:
    hidden, memory = state
    inputs = x @ cell["input"] + cell["bias"]
    z, r, n, _ = jnp.split(inputs, 4, axis=-1)
    hz, hr, hn, _ = jnp.split(hidden @ cell["hidden"], 4, axis=-1)
    z, r = jax.nn.sigmoid(z + hz), jax.nn.sigmoid(r + hr)
    return (1 - z) * jnp.tanh(n + r * hn) + z * hidden, memory


def _make_recurrent(name: str, cell_fn: Any, *, reverse: bool) -> Model:
    def loss(params: Any, batch: Any) -> jax.Array:
        xs = jnp.moveaxis(batch["x"].astype(params["out"].dtype), 1, 0)
        start = jnp.broadcast_to(params["start"], (xs.shape[1], WIDTH))

        def body(state, x):
            return cell_fn(params["cell"], state, x), None

        state = (start, jnp.zeros_like(start))
        (hidden, _), _ = jax.lax.scan(body, state, xs, reverse=reverse)
        return cross_entropy(hidden @ params["out"], batch["label"])

    return Model(name, _init_recurrent, loss, _sequences)


_init_nested = init_fn(
    3,
    {
        "layers": {"w": (2, 3, 6, 6), "b": np.zeros((2, 6))},
        "shared": (6, 6),
        "out": (6, NUM_CLASSES),
    },
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


# Contractions of several axes.


_init_vit = init_fn(
    4,
    {
        "patch": (4, 4, 4, WIDTH),
        "class": np.zeros((1, 1, WIDTH)),
        "position": (1, 5, WIDTH),
        "query": (WIDTH, HEADS, 4),
        "key": (WIDTH, HEADS, 4),
        "value": (WIDTH, HEADS, 4),
        "merge": (HEADS, 4, WIDTH),
        "out": (WIDTH, NUM_CLASSES),
    },
)


def _vit_loss(params: Any, batch: Any) -> jax.Array:
    x = batch["image"].astype(params["patch"].dtype)
    x = _conv(x, params["patch"], window_strides=(4, 4), padding="VALID")
    x = x.reshape(x.shape[0], 4, WIDTH)
    start = jnp.broadcast_to(params["class"], (x.shape[0], 1, WIDTH))
    x = jnp.concatenate([start, x], axis=1) + params["position"]
    names = ("query", "key", "value")
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, params[name]) for name in names)
    scores = jnp.einsum("bthk,bshk->bhts", q, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores).astype(x.dtype)
    attended = jnp.einsum("bhts,bshk->bthk", weights, v)
    x = x + jnp.einsum("bthk,hkd->btd", attended, params["merge"])
    return cross_entropy(x[:, 0] @ params["out"], batch["label"])


_init_experts = init_fn(
    5,
    {
        "router": (6, 4),
        "up": (4, 6, 8),
        "bias": np.zeros((4, 8)),
        "down": (4, 8, 6),
        "out": (6, NUM_CLASSES),
    },
)


def _experts_loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"].astype(params["out"].dtype)
    share = jax.nn.softmax((x @ params["router"]).astype(jnp.float32)).astype(x.dtype)
    hidden = jnp.einsum("btd,edh->ebth", x, params["up"])
    hidden = jax.nn.gelu(hidden + params["bias"][:, None, None])
    outputs = jnp.einsum("ebth,ehd->ebtd", hidden, params["down"])
    x = x + jnp.einsum("bte,ebtd->btd", share, outputs)
    return cross_entropy(x.mean(1) @ params["out"], batch["label"])


# Parameters that are computed from others.


_init_weight_norm = init_fn(
    6,
    {
        "direction": (6, 8),
        "size": np.ones(8),
        "shift": np.zeros(8),
        "out": (8, NUM_CLASSES),
    },
)


def _weight_norm_loss(params: Any, batch: Any) -> jax.Array:
    wide = params["direction"].astype(jnp.float32)
    unit = wide * jax.lax.rsqrt(jnp.sum(jnp.square(wide), axis=0, keepdims=True))
    w = unit.astype(params["size"].dtype) * params["size"]
    x = batch["x"].astype(w.dtype) @ w
    # A scale that is stored as its difference to one.
    x = jnp.tanh(x) * (1 + params["shift"])
    return cross_entropy(x @ params["out"], batch["label"])


_init_lora = init_fn(7, {"a": (6, 2), "b": (2, 8), "c": (8, 2), "d": (2, NUM_CLASSES)})


def _lora_loss(params: Any, batch: Any) -> jax.Array:
    rng = np.random.default_rng(8)
    dtype = params["a"].dtype
    frozen = normal(rng, (6, 8), dtype), normal(rng, (8, NUM_CLASSES), dtype)
    x = batch["x"].astype(dtype)
    x = jnp.tanh(x @ frozen[0] + x @ params["a"] @ params["b"])  # two products of data
    merged = frozen[1] + params["c"] @ params["d"]  # one of parameters
    return cross_entropy(x @ merged, batch["label"])


# Parameters that are used more than once, or not by data at all.


_init_shared = init_fn(
    9, {"w": (6, 6), "halves": (6, 12), "unused": np.ones(3), "out": (6, NUM_CLASSES)}
)


def _shared_loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"].astype(params["w"].dtype)
    x = jnp.tanh(x @ params["w"]) @ params["w"] + x @ params["w"].T
    left, right = jnp.split(params["halves"], 2, axis=1)
    x = jnp.tanh(x @ left) + x @ right
    return cross_entropy(x @ params["out"], batch["label"])


def _regularised_loss(params: Any, batch: Any) -> jax.Array:
    squares = (jnp.sum(jnp.square(w.astype(jnp.float32))) for w in params.values())
    return _shared_loss(params, batch) + 0.1 * sum(squares)


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

PARAMETER_USES = (
    Model("group_norm_cnn", _init_group_norm_cnn, _group_norm_cnn_loss, _images),
    _make_decoder("decoder", tied=False, scan=False, remat=False),
    _make_decoder("decoder-tied", tied=True, scan=False, remat=False),
    _make_decoder("decoder-scan", tied=False, scan=True, remat=False),
    _make_decoder("decoder-remat", tied=False, scan=False, remat=True),
    _make_decoder("decoder-scan-remat-tied", tied=True, scan=True, remat=True),
    _make_recurrent("lstm", _lstm_cell, reverse=False),
    _make_recurrent("gru-reversed", _gru_cell, reverse=True),
    Model("nested_loops", _init_nested, _nested_loss, _vectors),
    Model("vit", _init_vit, _vit_loss, _images),
    Model("experts", _init_experts, _experts_loss, _sequences),
    Model("weight_norm", _init_weight_norm, _weight_norm_loss, _vectors),
    Model("lora", _init_lora, _lora_loss, _vectors),
    Model("shared", _init_shared, _shared_loss, _vectors),
    Model("regularised", _init_shared, _regularised_loss, _vectors),
    Model("control_flow", _init_shared, _control_flow_loss, _vectors),
)
