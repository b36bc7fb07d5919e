"""Small models as people write them, in five libraries."""

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "jax")

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
from flax import nnx

KEY = jax.random.key(0)
VOCABULARY, LENGTH, WIDTH, HEADS = 32, 12, 16, 2


class Task(NamedTuple):
    """A model: `loss_fn(params, batch)` for one example, as a batch of one."""

    params: Any
    loss_fn: Callable[[Any, Any], jax.Array]
    batch: Any


def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(VOCABULARY, size=(4, LENGTH + 1))


def next_token_loss(logits: jax.Array, batch: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), batch[:, 1:]
    )
    return jnp.mean(losses)


def filled(shapes: Any) -> Any:
    """Parameters of these shapes."""
    rng = np.random.default_rng(0)

    def draw(x):
        is_matrix = len(x.shape) > 1
        scale, mean = (np.sqrt(1 / x.shape[-2]), 0) if is_matrix else (0.1, 1)
        return jax.device_put(rng.normal(mean, scale, x.shape).astype(np.float32))

    return jax.tree.map(draw, shapes)


class _GPT2Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        q, k, v = jnp.split(nn.Dense(3 * WIDTH)(y), 3, axis=-1)
        heads = [x.reshape(*x.shape[:2], HEADS, -1) for x in (q, k, v)]
        mask = nn.make_causal_mask(x[..., 0])
        mixed = nn.dot_product_attention(*heads, mask=mask).reshape(x.shape)
        x = x + nn.Dense(WIDTH)(mixed)
        y = nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH)(nn.gelu(y))


class _GPT2(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCABULARY, WIDTH, name="wte")
        positions = nn.Embed(2 * LENGTH, WIDTH, name="wpe")
        x = embed(tokens) + positions(jnp.arange(tokens.shape[1])[None])
        x = _GPT2Block()(x)
        return embed.attend(nn.LayerNorm()(x))


def linen_gpt2() -> Task:
    model, batch = _GPT2(), tokens()
    shapes = jax.eval_shape(model.init, KEY, batch[:1, :-1])["params"]

    def loss_fn(params, batch):
        return next_token_loss(model.apply({"params": params}, batch[:, :-1]), batch)

    return Task(filled(shapes), loss_fn, batch)


class _RMSNorm(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.zeros(WIDTH))

    def __call__(self, x):
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
        return (normed * (1 + self.scale[...].astype(jnp.float32))).astype(x.dtype)


def _rotate(x):
    """Rotary positions: x is (B, T, H, C)."""
    size = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 10_000 ** (jnp.arange(size) / size)
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


class _GemmaBlock(nnx.Module):
    """Two query heads share one head of keys and values."""

    def __init__(self, rngs):
        einsum = functools.partial(nnx.Einsum, rngs=rngs)
        size = WIDTH // HEADS
        self.norm, self.norm_mlp = _RMSNorm(), _RMSNorm()
        self.query = einsum("btd,dhc->bthc", (WIDTH, HEADS, size))
        self.key_value = einsum("btd,xdc->xbtc", (2, WIDTH, size))
        self.out = einsum("bthc,hcd->btd", (HEADS, size, WIDTH))
        self.gate = einsum("btd,xdf->xbtf", (2, WIDTH, 2 * WIDTH))
        self.down = nnx.Linear(2 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        y = self.norm(x)
        query = _rotate(self.query(y))
        key, value = self.key_value(y)
        key = _rotate(key[:, :, None])[:, :, 0]
        scores = jnp.einsum("bthc,bsc->bhts", query, key).astype(jnp.float32)
        scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e30)
        weights = jax.nn.softmax(scores).astype(x.dtype)
        x = x + self.out(jnp.einsum("bhts,bsc->bthc", weights, value))
        gate, up = self.gate(self.norm_mlp(x))
        return x + self.down(nnx.gelu(gate) * up)


class _Gemma(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.block = _GemmaBlock(rngs)
        self.norm = _RMSNorm()

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x * jnp.sqrt(WIDTH).astype(x.dtype)
        x = self.block(x)
        logits = self.embed.attend(self.norm(x)).astype(jnp.float32)
        return 30 * jnp.tanh(logits / 30)


def nnx_gemma() -> Task:
    model = nnx.eval_shape(lambda: _Gemma(nnx.Rngs(0)))
    graphdef, shapes = nnx.split(model, nnx.Param)

    def loss_fn(params, batch):
        return next_token_loss(nnx.merge(graphdef, params)(batch[:, :-1]), batch)

    return Task(filled(shapes), loss_fn, tokens())


class _UNet(eqx.Module):
    stem: eqx.nn.Conv2d
    norms: list[eqx.nn.GroupNorm]
    down: eqx.nn.Conv2d
    middle: eqx.nn.Conv2d
    up: eqx.nn.ConvTranspose2d
    out: eqx.nn.Conv2d

    def __init__(self, key):
        keys = jax.random.split(key, 5)
        self.stem = eqx.nn.Conv2d(3, 8, 3, padding=1, key=keys[0])
        self.norms = [eqx.nn.GroupNorm(2, n) for n in (8, 16, 8)]
        self.down = eqx.nn.Conv2d(8, 16, 3, stride=2, padding=1, key=keys[1])
        self.middle = eqx.nn.Conv2d(16, 16, 3, padding=1, key=keys[2])
        self.up = eqx.nn.ConvTranspose2d(16, 8, 2, stride=2, key=keys[3])
        self.out = eqx.nn.Conv2d(16, 3, 1, key=keys[4])

    def __call__(self, x):
        skip = jax.nn.silu(self.norms[0](self.stem(x)))
        x = jax.nn.silu(self.norms[1](self.down(skip)))
        x = x + self.middle(x)
        x = jax.nn.silu(self.norms[2](self.up(x)))
        return self.out(jnp.concatenate([x, skip]))


def equinox_unet() -> Task:
    shapes, static = eqx.partition(
        eqx.filter_eval_shape(_UNet, KEY), lambda x: isinstance(x, jax.ShapeDtypeStruct)
    )
    rng = np.random.default_rng(0)
    batch = rng.normal(size=(4, 2, 3, 8, 8)).astype(np.float32)

    def loss_fn(params, batch):
        made = jax.vmap(eqx.combine(params, static))(batch[:, 0])
        return jnp.mean(jnp.square(made.astype(jnp.float32) - batch[:, 1]))

    return Task(filled(shapes), loss_fn, batch)


def haiku_transformer() -> Task:
    def forward(tokens):
        init = hk.initializers.VarianceScaling(1.0)
        x = hk.Embed(VOCABULARY, WIDTH)(tokens)
        x = x + hk.get_parameter("positions", (LENGTH, WIDTH), x.dtype, jnp.zeros)
        mask = jnp.tri(LENGTH)[None, None]
        attention = hk.MultiHeadAttention(HEADS, WIDTH // HEADS, w_init=init)
        y = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        x = x + attention(y, y, y, mask=mask)
        y = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        x = x + hk.Linear(WIDTH)(jax.nn.gelu(hk.Linear(4 * WIDTH)(y)))
        return hk.Linear(VOCABULARY)(x)

    model, batch = hk.without_apply_rng(hk.transform(forward)), tokens()

    def loss_fn(params, batch):
        return next_token_loss(model.apply(params, batch[:, :-1]), batch)

    return Task(filled(jax.eval_shape(model.init, KEY, batch[:1, :-1])), loss_fn, batch)


def keras_lstm() -> Task:
    model = keras.Sequential(
        [
            keras.layers.Embedding(VOCABULARY, WIDTH),
            keras.layers.LSTM(WIDTH, return_sequences=True),
            keras.layers.Dense(VOCABULARY),
        ]
    )
    model.build((None, LENGTH))
    params = filled([x.value for x in model.trainable_variables])
    fixed = [x.value for x in model.non_trainable_variables]

    def loss_fn(params, batch):
        logits, _ = model.stateless_call(params, fixed, batch[:, :-1], training=True)
        return next_token_loss(logits, batch)

    return Task(params, loss_fn, tokens())


MODELS = {
    fun.__name__: fun
    for fun in (linen_gpt2, nnx_gemma, equinox_unet, haiku_transformer, keras_lstm)
}


@functools.cache
def make(name: str) -> Task:
    with jax.numpy_dtype_promotion("standard"):
        return MODELS[name]()
