"""What the models of the zoo are made of."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

NUM_CLASSES = 3
VOCABULARY, LENGTH, WIDTH, HEADS = 11, 5, 8, 2

Init = Callable[[Any], Any]
Loss = Callable[[Any, Any], jax.Array]


class Model(NamedTuple):
    """A loss and what it takes.

    Attributes:
      name: for test ids.
      init: `init(dtype)` gives the parameters.
      loss: `loss(params, batch)` is the mean loss of a batch, in float32.
      make_batch: `make_batch(seed, size)` gives a batch with a leading example axis.
    """

    name: str
    init: Init
    loss: Loss
    make_batch: Callable[[int, int], Any]


# All models that need no other library, by their names.
ZOO: dict[str, Model] = {}


def model(
    name: str,
    make_batch: Any,
    seed: int = 0,
    *,
    init: Init | None = None,
    **shapes: Any,
) -> Callable[[Loss], Loss]:
    """Makes a loss a model of the zoo, whose `init` has given shapes (`init_fn`)."""

    def register(loss: Loss) -> Loss:
        made = init_fn(seed, **shapes) if init is None else init
        ZOO[name] = Model(name, made, loss, make_batch)
        return loss

    return register


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    scale = 1 / np.sqrt(np.prod(shape[:-1]))
    # Converted by NumPy: every conversion by jax is one more program to compile.
    return jnp.asarray(np.float32(rng.normal(0, scale, shape)).astype(dtype))


def init_fn(seed: int, **shapes: Any) -> Init:
    """An `init`: normal arrays for tuples (also in dictionaries), others as given."""

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


images, sequences, vectors = (
    labelled("image", 8, 8, 4),
    labelled("x", LENGTH, 6),
    labelled("x", 6),
)


def token_batch(seed: int, size: int) -> Any:
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(VOCABULARY, size=(size, LENGTH + 1)), jnp.int32)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(log_probs, labels[..., None], axis=-1))


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
