"""How long do the noise and the batch of one step of a large run take?

Noise is drawn for ten million entries: exact noise, the same on a fine grid of 2^20
units, and `jax.random.normal`, in turn. Poisson batches are drawn from up to a billion
examples.

    python -m benchmarks.large_runs        # a minute on two cores
"""

import functools
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp

import dpmp
from benchmarks import harness
from dpmp import noise_addition
from dpmp.batch_selection import PoissonSampling

# The number of examples, and the probability to take part in a step.
BATCHES = (
    (60_000, 0.01),
    (10**6, 0.01),
    (10**8, 1e-4),
    (10**8, 1e-2),
    (10**9, 1e-6),
    (10**9, 1e-4),
)


def noisy_sums() -> dict[str, Callable[..., Any]]:
    """Functions of a sum in integers and a step, by the kind of noise."""

    def discrete(resolution: int, counts: jax.Array, step: Any) -> jax.Array:
        key = jax.random.key(0)
        privatizer: Any = noise_addition.gaussian_privatizer(stddev=1.0, prng_key=key)
        total = dpmp.GridArray(counts, 1 / resolution)
        return privatizer.update(total, noise_addition.NoiseState(key, step))[0]

    def normal(impl: str, counts: jax.Array, step: Any) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(0, impl=impl), step)
        return counts.astype(jnp.float32) + jax.random.normal(key, counts.shape)

    return {
        "jax.random.normal": functools.partial(normal, "threefry2x32"),
        "exact": functools.partial(discrete, 2**15),
        "fine": functools.partial(discrete, 2**20),
        "jax.random.normal, rbg": functools.partial(normal, "rbg"),
    }


def noise(rounds: int, entries: int) -> dict[str, Any]:
    """Times the noise of a CPU."""

    def draw(add: Callable[..., Any]) -> Callable[[], Any]:
        of_zeros = jax.jit(lambda step: add(jnp.zeros(entries, jnp.int32), step))
        return functools.partial(of_zeros, jnp.int32(0))

    functions = noisy_sums()
    del functions["jax.random.normal, rbg"]  # for accelerators
    draws = {name: draw(add) for name, add in functions.items()}
    measured = harness.in_turn(draws, rounds)
    return {
        "entries": entries,
        "milliseconds": measured.milliseconds(),
        "time_ratio": measured.time_over("jax.random.normal"),
    }


def batch(rounds: int, num_examples: int, sampling_prob: float) -> dict[str, Any]:
    """Times the indices of a batch."""
    sampling = PoissonSampling(sampling_prob, 1)
    draw = functools.partial(sampling.indices, 0, num_examples=num_examples, key=7)
    return {
        "num_examples": num_examples,
        "sampling_prob": sampling_prob,
        "milliseconds": harness.in_turn({"indices": draw}, rounds).milliseconds(),
    }


def benchmark(
    question: Annotated[str, harness.Each(["noise", "batches"])],
    rounds: int = 15,
    entries: int = 10_000_000,
) -> harness.Lines:
    """A line for all kinds of noise, and one for each size of batches."""
    if question == "noise":
        yield noise(rounds, entries)
    else:
        yield from (batch(rounds, *sizes) for sizes in BATCHES)


if __name__ == "__main__":
    tiny = {"rounds": 1, "entries": 1000}
    harness.main(benchmark, tiny=tiny)
