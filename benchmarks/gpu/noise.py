"""What discrete Gaussian noise for a billion entries costs, beside `jax.random.normal`.

A sum of 2^30 integers takes 4 GiB, and as much again with noise, in float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

import dpmp
from benchmarks.gpu import programs
from benchmarks.gpu.programs import Program
from benchmarks.gpu.session import Session
from dpmp import noise_addition

_RESOLUTIONS = {"discrete": 2**15, "discrete, fine": 2**20}


def run(session: Session) -> None:
    """Times all generators in turn, with a line when each has run once."""
    size = 2**12 if session.is_tiny else 2**30
    generators = _generators(size)
    if session.compile_only:
        programs.compile_all(session, generators)
        return
    args = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), generators["discrete"].args
    )
    trials = dict(programs.try_all(session, generators, args))
    calls = {name: trial.call for name, trial in trials.items()}
    seconds = programs.in_turn(session, calls, rounds=2 if session.is_tiny else 7)
    figures = programs.summarize(seconds, reference="jax.random.normal")
    rates = {
        name: round(size / (ms / 1e3) / 1e9, 3)
        for name, ms in figures["milliseconds"].items()
    }
    session.record("comparison", entries=size, gigaentries_per_second=rates, **figures)


def _generators(size: int) -> dict[str, Program]:
    """Functions of a sum of integers and of a step, by name."""
    args = jax.ShapeDtypeStruct((size,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)

    def discrete(resolution: int, steps: jax.Array, step: jax.Array) -> jax.Array:
        key = jax.random.key(0)
        privatizer: Any = noise_addition.gaussian_privatizer(stddev=1.0, prng_key=key)
        total = dpmp.GridArray(steps, 1 / resolution)
        return privatizer.update(total, noise_addition.NoiseState(key, step))[0]

    def normal(impl: str, steps: jax.Array, step: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(0, impl=impl), step)
        return steps.astype(jnp.float32) + jax.random.normal(key, steps.shape)

    functions = {
        **{k: functools.partial(discrete, r) for k, r in _RESOLUTIONS.items()},
        "jax.random.normal": functools.partial(normal, "threefry2x32"),
        "jax.random.normal, rbg": functools.partial(normal, "rbg"),
    }
    return {name: Program(f, args) for name, f in functions.items()}
