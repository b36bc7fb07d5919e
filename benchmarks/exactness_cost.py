"""What do exact sums and exact noise cost, next to floating point?

Quoted are ratios of time, as `timing.py` takes them, and of the temporary memory of the
compiled programs. "float32" sums in float32 and adds `jax.random.normal`; "exact" sums
integers and adds discrete Gaussian noise.

- clip_and_sum: 64 gradients of a million entries that are there already.
- clipped_grad: the same with the gradients of an MLP.
- step: a whole training step of a transformer: gradients, noise, Adam.
- noise: for ten million entries, against `jax.random.normal` with jax's default
  generator.

    python -m benchmarks.exactness_cost        # six minutes on two cores

Every line is appended to benchmarks/results/exactness_cost.jsonl.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import dpmp
from benchmarks import models, results, timing
from dpmp import noise_addition
from dpmp.clipping import clipped_fun
from dpmp.numerics import ExactSums
from dpmp.tools.selfcheck._modes import float_noise

DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}
# Three draws of noise, and norms checked in 64 bits.
FINE = ExactSums(2**20)


def clip_and_sum(dtype: Any) -> tuple[dict[str, Callable[..., Any]], Any]:
    """Sums of stored gradients."""
    grads = jax.random.normal(jax.random.key(0), (64, 1_000_000)).astype(dtype)

    def clip(**kwargs):
        return clipped_fun(
            lambda grad: grad, keep_batch_dim=False, **{"l2_clip_norm": 1.0, **kwargs}
        )

    return _by_arithmetic(clip), (grads,)


def clipped_grad(dtype: Any) -> tuple[dict[str, Callable[..., Any]], Any]:
    """Sums of the gradients of an MLP."""
    task = models.mlp(dtype)

    def clip(**kwargs):
        return dpmp.clipped_grad(task.loss_fn, l2_clip_norm=1.0, **kwargs)

    return _by_arithmetic(clip), (task.params, task.batch)


def step(dtype: Any) -> tuple[dict[str, Callable[..., Any]], Any]:
    """Training steps of a transformer."""
    task = models.transformer(dtype)
    optimizer = optax.adam(1e-3)
    key = jax.random.key(0)
    params = jax.tree.map(lambda x: x.astype(jnp.float32), task.params)

    def make_step(privatizer, **kwargs):
        grad_fn = dpmp.clipped_grad(task.loss_fn, l2_clip_norm=1.0, **kwargs)

        def one_step(params, opt_state, noise_state, batch):
            compute_params = jax.tree.map(lambda x: x.astype(dtype), params)
            grads, noise_state = privatizer.update(
                grad_fn(compute_params, batch), noise_state
            )
            updates, opt_state = optimizer.update(grads, opt_state)
            return optax.apply_updates(params, updates), opt_state, noise_state

        return one_step

    exact = noise_addition.gaussian_privatizer(stddev=1.0, prng_key=key)
    floats = float_noise(stddev=1.0, prng_key=key)
    functions = {
        "float32": make_step(floats, arithmetic="float32"),
        "exact": make_step(exact, arithmetic="exact"),
        "fine": make_step(exact, arithmetic=FINE),
    }
    args = (params, optimizer.init(params), exact.init(params), task.batch)
    return functions, args


def noise(dtype: Any) -> tuple[dict[str, Callable[..., Any]], Any]:
    """Ten million draws."""
    size = 10_000_000
    privatizer: Any = noise_addition.gaussian_privatizer(
        stddev=1.0, prng_key=jax.random.key(0)
    )

    def exact(resolution):
        def draw(key, noise_state):
            del key
            steps = jnp.zeros(size, jnp.int32)
            return privatizer.update(
                dpmp.GridArray(steps, 1 / resolution), noise_state
            )[0]

        return draw

    functions = {
        "float32": lambda key, _: jax.random.normal(key, (size,), dtype),
        "exact": exact(2**15),
        "fine": exact(2**20),
    }
    return functions, (jax.random.key(0), privatizer.init(None))


def _by_arithmetic(clip: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {
        "float32": clip(arithmetic="float32"),
        "exact": clip(arithmetic="exact"),
        "fine": clip(arithmetic=FINE),
    }


QUESTIONS = {
    "clip_and_sum": (clip_and_sum, DTYPES),
    "clipped_grad": (clipped_grad, DTYPES),
    "step": (step, DTYPES),
    "noise": (noise, {"float32": jnp.float32}),
}


def summarize(measured: dict[str, timing.Measured]) -> dict[str, dict[str, float]]:
    """Milliseconds, ratios to "float32" and compile seconds of each contender."""
    floats = measured["float32"]
    return {
        "milliseconds": {name: timing.median_ms(m) for name, m in measured.items()},
        "time_ratio": {
            name: timing.time_ratio(m, floats) for name, m in measured.items()
        },
        "memory_ratio": {
            name: timing.memory_ratio(m, floats) for name, m in measured.items()
        },
        "compile_seconds": {
            name: round(m.compile_seconds, 1) for name, m in measured.items()
        },
    }


def main() -> None:
    """Runs what was asked for and appends its figures."""
    parser = argparse.ArgumentParser(description="Measures what exactness costs.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--question", choices=QUESTIONS, nargs="*")
    args = parser.parse_args()
    for name in args.question or QUESTIONS:
        make, dtypes = QUESTIONS[name]
        for dtype_name, dtype in dtypes.items():
            measured = timing.measure(*make(dtype), args.rounds)
            results.append(
                "exactness_cost",
                question=name,
                dtype=dtype_name,
                rounds=args.rounds,
                **summarize(measured),
            )


if __name__ == "__main__":
    main()
