"""Networks as they are common: dense, convolutional, recurrent, transformers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._parts import (
    HEADS,
    LENGTH,
    NUM_CLASSES,
    VOCABULARY,
    WIDTH,
    attention,
    cross_entropy,
    images,
    init_fn,
    labelled,
    model,
    rms_norm,
    sequences,
    token_batch,
    vectors,
)

_DEPTH = 3


@model(
    "mlp",
    vectors,
    0,
    hidden={"w": (6, 8), "b": np.zeros(8)},
    out={"w": (8, NUM_CLASSES), "b": np.zeros(NUM_CLASSES)},
)
def _mlp_loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"].astype(params["hidden"]["w"].dtype)
    x = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return cross_entropy(x @ params["out"]["w"] + params["out"]["b"], batch["label"])


@model(
    "conv",
    labelled("image", 6, 6, 2),
    1,
    kernel=(3, 3, 2, 4),
    bias=np.zeros(4),
    out=(4, NUM_CLASSES),
)
def _conv_loss(params: Any, batch: Any) -> jax.Array:
    x = _conv(batch["image"].astype(params["kernel"].dtype), params["kernel"])
    x = jax.nn.relu(x + params["bias"]).mean((1, 2))
    return cross_entropy(x @ params["out"], batch["label"])


def _conv(x: jax.Array, kernel: jax.Array, **kwargs: Any) -> jax.Array:
    options = {"window_strides": (1, 1), "padding": "SAME", **kwargs}
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, dimension_numbers=numbers, **options)


@model(
    "transformer",
    token_batch,
    2,
    embedding=(VOCABULARY, WIDTH),
    position=(LENGTH, WIDTH),
    scale=np.ones((2, WIDTH)),
    qkv=(WIDTH, 3 * WIDTH),
    proj=(WIDTH, WIDTH),
    up=(WIDTH, 2 * WIDTH),
    down=(2 * WIDTH, WIDTH),
)
def _transformer_loss(params: Any, batch: Any) -> jax.Array:
    tokens, targets = batch[:, :-1], batch[:, 1:]
    x = params["embedding"][tokens] + params["position"]
    attended = attention(rms_norm(x, params["scale"][0]), params["qkv"])
    x = x + attended @ params["proj"]
    hidden = jax.nn.gelu(rms_norm(x, params["scale"][1]) @ params["up"])
    x = x + hidden @ params["down"]
    return cross_entropy(x @ params["embedding"].T, targets)


@model(
    "group_norm_cnn",
    images,
    0,
    stem=(3, 3, 4, 8),
    depthwise=(3, 3, 1, 16),
    grouped=(3, 2, 8, 4),
    transposed=(2, 2, 4, 6),
    scale=np.ones(8),
    bias=np.zeros(8),
    out=(6, NUM_CLASSES),
)
def _group_norm_cnn_loss(params: Any, batch: Any) -> jax.Array:
    """Strided, dilated, grouped and depthwise convolutions, and a group norm."""
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


_init_layers = init_fn(
    1,
    embedding=(VOCABULARY, WIDTH),
    position=(LENGTH, WIDTH),
    layers={
        "scale": np.ones((_DEPTH, 2, WIDTH)),
        "qkv": (_DEPTH, WIDTH, 3 * WIDTH),
        "proj": (_DEPTH, WIDTH, WIDTH),
        "up": (_DEPTH, WIDTH, 2 * WIDTH),
        "up_bias": np.zeros((_DEPTH, 2 * WIDTH)),
        "down": (_DEPTH, 2 * WIDTH, WIDTH),
    },
    shared=(WIDTH, WIDTH),
    head=(WIDTH, VOCABULARY),
)


def _init_decoder(dtype: Any) -> Any:
    """Matrices of layers are twice as large; this is exact in any dtype."""
    params = _init_layers(dtype)
    for name in ("qkv", "proj", "up", "down"):
        twice = np.asarray(params["layers"][name]) * np.asarray(2, dtype)
        params["layers"][name] = jnp.asarray(twice)
    return params


def _layer(x: jax.Array, layer: Any, shared: jax.Array) -> jax.Array:
    attended = attention(rms_norm(x, layer["scale"][0]), layer["qkv"])
    x = x + attended @ layer["proj"] + jnp.tanh(x @ shared)
    hidden = rms_norm(x, layer["scale"][1]) @ layer["up"] + layer["up_bias"]
    return x + jax.nn.gelu(hidden) @ layer["down"]


def _add_decoder(name: str, *, tied: bool = False, remat: bool = False) -> None:
    @model(name, token_batch, init=_init_decoder)
    def loss(params: Any, batch: Any) -> jax.Array:
        tokens, targets = batch[:, :-1], batch[:, 1:]
        x = params["embedding"][tokens] + params["position"]
        layer_fn = jax.checkpoint(_layer) if remat else _layer

        def body(x, layer):
            return layer_fn(x, layer, params["shared"]), None

        x, _ = jax.lax.scan(body, x, params["layers"])
        head = params["embedding"].T if tied else params["head"]
        return cross_entropy(x @ head, targets)


_add_decoder("decoder-scan")
_add_decoder("decoder-scan-remat-tied", tied=True, remat=True)


@model(
    "lstm",
    sequences,
    2,
    cell={
        "input": (6, 4 * WIDTH),
        "hidden": (WIDTH, 4 * WIDTH),
        "bias": np.zeros(4 * WIDTH),
    },
    start=(1, WIDTH),
    out=(WIDTH, NUM_CLASSES),
)
def _lstm_loss(params: Any, batch: Any) -> jax.Array:
    xs = jnp.moveaxis(batch["x"].astype(params["out"].dtype), 1, 0)
    start = jnp.broadcast_to(params["start"], (xs.shape[1], WIDTH))

    def body(state, x):
        return _lstm_cell(params["cell"], state, x), None

    (hidden, _), _ = jax.lax.scan(body, (start, jnp.zeros_like(start)), xs)
    return cross_entropy(hidden @ params["out"], batch["label"])


def _lstm_cell(cell: Any, state: Any, x: jax.Array) -> Any:
    hidden, memory = state
    gates = x @ cell["input"] + hidden @ cell["hidden"] + cell["bias"]
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    memory = jax.nn.sigmoid(f) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(memory), memory


@model(
    "vit",
    images,
    4,
    patch=(4, 4, 4, WIDTH),
    cls=np.zeros((1, 1, WIDTH)),
    position=(1, 5, WIDTH),
    query=(WIDTH, HEADS, 4),
    key=(WIDTH, HEADS, 4),
    value=(WIDTH, HEADS, 4),
    merge=(HEADS, 4, WIDTH),
    out=(WIDTH, NUM_CLASSES),
)
def _vit_loss(params: Any, batch: Any) -> jax.Array:
    x = batch["image"].astype(params["patch"].dtype)
    x = _conv(x, params["patch"], window_strides=(4, 4), padding="VALID")
    x = x.reshape(x.shape[0], 4, WIDTH)
    start = jnp.broadcast_to(params["cls"], (x.shape[0], 1, WIDTH))
    x = jnp.concatenate([start, x], axis=1) + params["position"]
    names = ("query", "key", "value")
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, params[name]) for name in names)
    scores = jnp.einsum("bthk,bshk->bhts", q, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores).astype(x.dtype)
    attended = jnp.einsum("bhts,bshk->bthk", weights, v)
    x = x + jnp.einsum("bthk,hkd->btd", attended, params["merge"])
    return cross_entropy(x[:, 0] @ params["out"], batch["label"])
