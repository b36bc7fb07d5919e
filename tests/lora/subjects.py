"""Functions whose matrices are used in the ways in which models use them."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import lora

KEY = jax.random.key(0)


def normal(number: int, *shape: int) -> jax.Array:
    x = np.random.default_rng(number).normal(size=shape) / np.sqrt(shape[-2])
    return jax.device_put(x.astype(np.float32))


class Subject(NamedTuple):
    """`loss_fn(params, batch)` for one example, and the targets of adapters."""

    loss_fn: Any
    params: Any
    batch: Any
    targets: str


LAYERS, WIDTH, HEADS, DEPTH, HIDDEN, LENGTH = 3, 12, 3, 4, 20, 5


def decoder() -> Subject:
    """A loop over layers, rematerialised; four axes; the embedding is tied."""
    params = {
        "embed": normal(0, 11, WIDTH),
        "layers": {
            "query": normal(1, LAYERS, WIDTH, HEADS, DEPTH),
            "key": normal(2, LAYERS, WIDTH, HEADS, DEPTH),
            "value": normal(3, LAYERS, WIDTH, HEADS, DEPTH),
            "out": normal(4, LAYERS, HEADS, DEPTH, WIDTH),
            "up": normal(5, LAYERS, WIDTH, HIDDEN),
            "down": normal(6, LAYERS, HIDDEN, WIDTH),
        },
    }

    def loss_fn(params, tokens):
        @jax.checkpoint
        def layer(x, w):
            names = ("query", "key", "value")
            q, k, v = (jnp.einsum("td,dhk->thk", x, w[n]) for n in names)
            scores = jax.nn.softmax(jnp.einsum("thk,shk->hts", q, k))
            mixed = jnp.einsum("hts,shk->thk", scores, v)
            x = x + jnp.einsum("thk,hkd->td", mixed, w["out"])
            return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

        x, _ = jax.lax.scan(layer, params["embed"][tokens], params["layers"])
        logits = jax.nn.log_softmax(x @ params["embed"].T)
        return -jnp.mean(logits[:, 1])

    tokens = jnp.arange(LENGTH, dtype=jnp.int32)
    return Subject(loss_fn, params, tokens, "layers/")


def unrolled() -> Subject:
    """Layers taken from a stack by numbers, and one by a traced number."""
    params = {"w": normal(0, LAYERS, WIDTH, WIDTH)}

    def loss_fn(params, x):
        for i in range(LAYERS):
            x = jnp.tanh(x @ params["w"][i])
        last = jax.lax.dynamic_index_in_dim(
            params["w"], jnp.argmax(x[0]) % LAYERS, keepdims=False
        )
        return jnp.sum(jnp.tanh(x @ last) ** 2)

    return Subject(loss_fn, params, normal(9, LENGTH, WIDTH), "w")


def turned() -> Subject:
    """A matrix of (outputs, inputs), from the left, cast and with a number."""
    params = {"w": normal(0, HIDDEN, WIDTH), "u": normal(1, WIDTH, HIDDEN)}

    def loss_fn(params, x):
        y = x @ params["w"].T
        z = jnp.einsum("oi,ti->ot", 0.5 * params["u"], y)
        return jnp.sum(jnp.tanh(z.astype(jnp.float32)) ** 2)

    return Subject(loss_fn, params, normal(9, LENGTH, WIDTH), ".")


def fused() -> Subject:
    """One matrix that is split in many ways, along inputs and outputs."""
    params = {"qkv": normal(0, WIDTH, 3 * WIDTH)}

    def loss_fn(params, x):
        q, k, v = jnp.split(params["qkv"], 3, axis=1)
        q = q.reshape(WIDTH, HEADS, DEPTH)
        scores = jnp.einsum("td,dhk,sk->hts", x, q, x[:, :DEPTH])
        lower = x[:, :6] @ v.reshape(2, 6, WIDTH)[1]
        return jnp.sum(jnp.tanh(scores) ** 2) + jnp.sum(jnp.sin(x @ k) * lower)

    return Subject(loss_fn, params, normal(9, LENGTH, WIDTH), "qkv")


def experts() -> Subject:
    """A batch of matrices, one for each expert."""
    params = {"w": normal(0, 4, WIDTH, HIDDEN)}

    def loss_fn(params, x):
        x = jnp.stack([x, x + 1, x * 2, -x])
        return jnp.sum(jnp.tanh(jnp.einsum("etd,edf->tef", x, params["w"])) ** 2)

    return Subject(loss_fn, params, normal(9, LENGTH, WIDTH), "w")


def branches() -> Subject:
    """A matrix in the branches of a condition, under jit, and in a loop."""
    params = {"w": normal(0, WIDTH, WIDTH)}

    def loss_fn(params, x):
        w = params["w"]
        x = jax.lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: jnp.cos(x) @ w, x)

        def step(x, _):
            return jnp.tanh(jax.jit(jnp.matmul)(x, w)), jnp.sum(x)

        x, sums = jax.lax.scan(step, x, None, length=2)
        return jnp.sum(x**2) + jnp.sum(sums)

    return Subject(loss_fn, params, normal(9, LENGTH, WIDTH), "w")


def narrow() -> Subject:
    """Axes of size one, which have a role too."""
    params = {"w": normal(0, WIDTH, 1), "v": normal(1, 1, WIDTH)}

    def loss_fn(params, x):
        return jnp.sum(jnp.sin(x @ params["w"])) + jnp.sum(jnp.tanh(x @ params["v"].T))

    return Subject(loss_fn, params, normal(9, LENGTH, WIDTH), ".")


SUBJECTS = {
    f.__name__: functools.cache(f)
    for f in (decoder, unrolled, turned, fused, experts, branches, narrow)
}


@functools.cache
def new_adapters(name: str) -> lora.Adapters:
    """Adapters of rank 2 for a subject, which change nothing yet."""
    subject = SUBJECTS[name]()
    return lora.init(
        KEY,
        subject.params,
        2,
        subject.targets,
        alpha=3.0,
        fun=subject.loss_fn,
        example_args=(subject.batch,),
    )


def trained(adapters: lora.Adapters) -> lora.Adapters:
    """The adapters with something added to every factor."""
    return jax.tree.map(
        lambda x: jax.device_put(
            np.asarray(x) + np.float32(0.1) * np.asarray(normal(x.size, *x.shape))
        ),
        adapters,
    )


@functools.cache
def adapters_of(name: str) -> lora.Adapters:
    """Adapters of rank 2 for a subject, which change something."""
    return trained(new_adapters(name))
