"""What do exact sums and exact noise cost, next to floating point?

Quoted are ratios of time within rounds, and of the temporary memory of the compiled
programs. "float32" sums in float32 and adds `jax.random.normal`; "exact" sums integers
and adds discrete Gaussian noise; "fine" does so on a grid of 2^20 units.

- clip_and_sum: 64 gradients of a million entries that are there already.
- clipped_grad: the same with the gradients of an MLP.
- step: a whole training step of a transformer: gradients, noise, Adam.
- noise: for ten million entries, against `jax.random.normal` with jax's default
  generator.

    python -m benchmarks.exactness_cost        # six minutes on two cores
"""

import functools
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

import dpmp
from benchmarks import harness, models
from dpmp import noise_addition
from dpmp.clipping import clipped_fun
from dpmp.numerics import ExactSums
from dpmp.tools.selfcheck._modes import float_noise

# The fine grid takes three draws of noise, and norms that are checked in 64 bits.
ARITHMETICS: dict[str, dict[str, Any]] = {
    "float32": {"arithmetic": "float32"},
    "exact": {"arithmetic": "exact"},
    "fine": {"arithmetic": ExactSums(2**20)},
}
Functions = dict[str, Callable[..., Any]]


def clip_and_sum(dtype: Any) -> tuple[Functions, Any]:
    """Sums of stored gradients."""
    grads = jax.random.normal(jax.random.key(0), (64, 1_000_000)).astype(dtype)
    clip = functools.partial(clipped_fun, keep_batch_dim=False, l2_clip_norm=1.0)
    return {k: clip(lambda x: x, **x) for k, x in ARITHMETICS.items()}, (grads,)


def clipped_grad(dtype: Any) -> tuple[Functions, Any]:
    """Sums of the gradients of an MLP."""
    task = models.mlp(dtype)
    return {k: task.clipped_grad(**x) for k, x in ARITHMETICS.items()}, task.args


def step(dtype: Any) -> tuple[Functions, Any]:
    """Training steps of a transformer."""
    task = models.transformer(dtype)
    optimizer = optax.adam(1e-3)
    params = jax.tree.map(lambda x: x.astype(jnp.float32), task.params)
    noise = {"stddev": 1.0, "prng_key": jax.random.key(0)}
    exact, floats = noise_addition.gaussian_privatizer(**noise), float_noise(**noise)

    def make_step(name: str) -> Callable[..., Any]:
        privatizer: Any = floats if name == "float32" else exact
        grad_fn = task.clipped_grad(**ARITHMETICS[name])

        def one_step(params, opt_state, noise_state, batch):
            compute_params = jax.tree.map(lambda x: x.astype(dtype), params)
            total = grad_fn(compute_params, batch)
            grads, noise_state = privatizer.update(total, noise_state)
            updates, opt_state = optimizer.update(grads, opt_state)
            return optax.apply_updates(params, updates), opt_state, noise_state

        return one_step

    args = (params, optimizer.init(params), exact.init(params), task.batch)
    return {name: make_step(name) for name in ARITHMETICS}, args


def noise(dtype: Any) -> tuple[Functions, Any]:
    """Ten million draws."""
    size, key = 10_000_000, jax.random.key(0)
    privatizer: Any = noise_addition.gaussian_privatizer(stddev=1.0, prng_key=key)

    def discrete(resolution: int) -> Callable[..., Any]:
        def draw(_, noise_state):
            zeros = dpmp.GridArray(jnp.zeros(size, jnp.int32), 1 / resolution)
            return privatizer.update(zeros, noise_state)[0]

        return draw

    return {
        "float32": lambda key, _: jax.random.normal(key, (size,), dtype),
        "exact": discrete(2**15),
        "fine": discrete(2**20),
    }, (key, privatizer.init(None))


QUESTIONS = {f.__name__: f for f in (clip_and_sum, clipped_grad, step, noise)}


def benchmark(
    question: Annotated[str, harness.Each(QUESTIONS)], rounds: int = 15
) -> harness.Lines:
    """A line for each question and dtype."""
    for dtype in ["float32"] if question == "noise" else models.DTYPES:
        functions, args = QUESTIONS[question](models.DTYPES[dtype])
        measured = harness.measure(functions, args, rounds)
        yield {"dtype": dtype, **measured.figures("float32")}


if __name__ == "__main__":
    harness.main(benchmark, tiny={"question": ["clipped_grad"], "rounds": 1})
