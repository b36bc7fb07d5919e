"""Tasks to train: images of digits, a transformer over bytes, adapters of SmolLM2."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
import sklearn.datasets

from benchmarks import models
from dpmp import lora

_CONTEXT = 64  # bytes of a record
_TOKENS = 32  # of a record, for SmolLM2
_PRETRAINING_STEPS = 250
_TILE = 48  # inputs that share a scale, in a base of 4 bits


class Task(NamedTuple):
    """What is trained, on what, and how."""

    # (params, batch) -> the mean loss of the batch, in the dtype of `params`
    loss_fn: Callable[[Any, Any], jax.Array]
    initial_params: Callable[[int], Any]  # seed -> float32 parameters
    train: Any  # arrays with a leading axis of examples
    evaluate: Callable[[Any], float]  # float32 parameters -> a score on held-out data
    metric: str  # the name of the score
    batch_size: int  # on average
    microbatch_size: int
    steps: int
    loss_weight: float  # `loss_fn` times this gives each prediction the weight 2^-22
    learning_rate: float  # the first; it goes to zero in a line
    l2_clip_norm: float = 1.0  # of the gradient of `loss_fn` of one example
    base: Any = None  # the frozen parameters to which the trained ones are adapters


def digits() -> Task:
    """Two convolutions and a linear layer, from scratch, on 8 x 8 images of digits."""
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 8, 8, 1).astype(np.float32)
    data = {"image": images, "label": labels.astype(np.int32)}
    is_held_out = np.arange(len(labels)) % 5 == 0
    held_out = jax.tree.map(lambda x: x[is_held_out], data)

    @jax.jit
    def accuracy(params):
        guesses = jnp.argmax(_digit_logits(params, held_out["image"]), axis=-1)
        return jnp.mean(guesses == held_out["label"])

    return Task(
        loss_fn=_digit_loss,
        initial_params=_initial_digit_params,
        train=jax.tree.map(lambda x: x[~is_held_out], data),
        evaluate=lambda params: float(accuracy(params)),
        metric="accuracy",
        batch_size=128,
        microbatch_size=16,
        steps=300,
        loss_weight=2.0**-22,
        learning_rate=1e-3,
    )


def _initial_digit_params(seed: int) -> Any:
    """Scaled normal weights."""
    shapes = {"first": (3, 3, 1, 16), "second": (3, 3, 16, 32), "head": (512, 10)}
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    initializer = jax.nn.initializers.he_normal()
    return {
        name: {"w": initializer(key, shape), "b": jnp.zeros(shape[-1])}
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def _digit_logits(params: Any, x: jax.Array) -> jax.Array:
    """From images, (B, 8, 8, 1), to (B, 10)."""
    for name, stride in (("first", 1), ("second", 2)):
        x = models.convolve(x, params[name]["w"], stride)
        x = jax.nn.relu(x + params[name]["b"])
    return x.reshape(len(x), -1) @ params["head"]["w"] + params["head"]["b"]


def _digit_loss(params: Any, batch: Any) -> jax.Array:
    """The softmax cross-entropy, in float32 from the logits on."""
    logits = _digit_logits(params, batch["image"])
    return models.cross_entropy(logits, batch["label"])


def transformer() -> Task:
    """A decoder over bytes: pre-trained on public text, then trained on docstrings."""
    example: Any = models.example("finetune_transformer")
    train, held_out = example.private_and_held_out(None)
    train, held_out = _encode(train), _encode(held_out)
    model = models.transformer(
        jnp.float32, 1, length=_CONTEXT, width=48, depth=2, heads=2, scan=True
    )
    pretrained = _pretrain(model, _encode(example.public_texts()))
    nats_per_byte = jax.jit(model.loss_fn)
    return Task(
        loss_fn=model.loss_fn,
        initial_params=lambda _: pretrained,
        train={"tokens": train},
        evaluate=lambda params: float(nats_per_byte(params, {"tokens": held_out})),
        metric="nats per byte",
        batch_size=256,
        microbatch_size=16,
        steps=24,
        loss_weight=2.0**-16,
        learning_rate=2e-3,
    )


def adapters(kind: str) -> Task:
    """The transformer with LoRA of rank 8 on a base of "bfloat16", "int8" or "int4"."""
    task = transformer()

    def packed(path: Any, x: jax.Array) -> Any:
        x = x.astype(jnp.bfloat16)
        if kind == "bfloat16" or "norms" in jax.tree_util.keystr(path) or x.ndim < 3:
            return x
        tiles = {1: _TILE} if kind == "int4" else {}
        return qwix.quantize(x, kind, channelwise_axes=[0, 2], tiled_axes=tiles)

    base = jax.tree_util.tree_map_with_path(packed, task.initial_params(0))
    targets = "blocks/(qkv|out|up|down)"

    def evaluate(adapters: Any) -> float:
        return task.evaluate(lora.merge(base, adapters, dtype=jnp.float32))

    return task._replace(
        loss_fn=lora.apply(task.loss_fn, base),
        initial_params=lambda seed: lora.init(jax.random.key(seed), base, 8, targets),
        evaluate=evaluate,
        learning_rate=1e-2,
        base=base,
    )


def smollm2_adapters(dtype: Any = jnp.bfloat16) -> Task:
    """SmolLM2-135M with LoRA, as in `examples/finetune_llm.py`, on docstrings.

    The frozen base and all products have the dtype; scores are those of a base in
    bfloat16.
    """
    from examples import llm, records  # their packages come with the extra `llm`

    model = llm.load(llm.installed_gguf(), dtype=dtype)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params)
    batches = [
        llm.make_batch(model.tokenizer, texts, _TOKENS)
        for texts in records.private_and_held_out(None)
    ]
    train, held_out = batches
    held_out = jax.tree.map(lambda x: x[:128], held_out)

    def apply(params: Any, tokens: jax.Array) -> jax.Array:
        base, adapters = params  # arrays that are closed over would become constants
        return lora.apply(model.apply, base)(adapters, tokens)

    def evaluate(adapters: Any) -> float:
        return llm.nats_per_token(apply, (narrow, adapters), held_out)

    return Task(
        loss_fn=lora.apply(functools.partial(llm.mean_nats, model.apply), model.params),
        initial_params=lambda seed: lora.init(
            jax.random.key(seed), model.params, 8, "attention/.*kernel"
        ),
        train=train,
        evaluate=evaluate,
        metric="nats per token",
        batch_size=64,
        microbatch_size=32,
        steps=8,
        loss_weight=1.0,
        learning_rate=1.5e-2,
        base=model.params,
    )


def _encode(texts: list[str]) -> np.ndarray:
    """The first bytes of each text that has enough of them, (B, _CONTEXT)."""
    encoded = [text.encode("utf-8", "replace")[:_CONTEXT] for text in texts]
    rows = [np.frombuffer(x, np.uint8) for x in encoded if len(x) == _CONTEXT]
    return np.stack(rows).astype(np.int32)


def _pretrain(model: models.Task, tokens: np.ndarray) -> Any:
    """Parameters after ordinary training on public text."""
    optimizer = optax.adam(optax.linear_schedule(4e-3, 0, _PRETRAINING_STEPS))

    @jax.jit
    def step(params, opt_state, tokens):
        grads = jax.grad(model.loss_fn)(params, {"tokens": tokens})
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    params, opt_state = model.params, optimizer.init(model.params)
    rng = np.random.default_rng(0)
    for _ in range(_PRETRAINING_STEPS):
        batch = tokens[rng.integers(len(tokens), size=32)]
        params, opt_state = step(params, opt_state, batch)
    return params
