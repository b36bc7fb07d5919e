"""The models that several benchmarks run, by name, with their batch sizes."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from benchmarks import models

DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}


class Subject(NamedTuple):
    """A model, and the batch sizes to run it with, with the rounds for each."""

    make: Callable[..., models.Task]
    rounds: dict[int, int]


_SMALL = {"length": 128, "width": 256, "depth": 4, "heads": 4, "vocabulary": 256}
_LARGE = {"length": 256, "width": 512, "depth": 5, "heads": 8, "vocabulary": 1024}

# For tests, and to try a benchmark out.
_TINY = {"length": 8, "width": 16, "depth": 1, "heads": 2, "vocabulary": 32}
TINY = Subject(functools.partial(models.transformer, **_TINY), {16: 2})

TASKS = {
    "transformer, 3M": Subject(
        functools.partial(models.transformer, **_SMALL), {16: 7, 64: 3}
    ),
    "transformer, 3M, scan": Subject(
        functools.partial(models.transformer, **_SMALL, scan=True), {64: 3}
    ),
    "transformer, 17M": Subject(
        functools.partial(models.transformer, **_LARGE), {16: 3, 64: 2}
    ),
    "cnn": Subject(models.cnn, {64: 7}),
    "lstm": Subject(models.lstm, {64: 7}),
}
