"""Times the steps of a trainer with each engine and several microbatch sizes."""

import contextlib
import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dpmp import _plain_text, _timing, _validate
from dpmp._arrays import as_device_dtypes
from dpmp._typing import PyTree
from dpmp.engines import METHODS
from dpmp.mechanism import DPSGD
from dpmp.planning._compiled_memory import compiled_step
from dpmp.training import DPTrainer


@dataclass(frozen=True)
class Candidate:
    """A mechanism that was timed.

    Attributes:
      mechanism: the mechanism, with its engine and its microbatch size.
      seconds: the median time of a step.
      temporary_bytes: the memory that the compiled step allocates besides its arguments
        and results; None if the compiler does not report it.
    """

    mechanism: DPSGD
    seconds: float
    temporary_bytes: int | None


@dataclass(frozen=True)
class Tuning:
    """The measurements of `tune`, the fastest first; `str` gives a table.

    Attributes:
      candidates: the mechanisms that were timed.
    """

    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> DPSGD:
        """The fastest mechanism, for a new `DPTrainer`."""
        return self.candidates[0].mechanism

    def __str__(self) -> str:
        rows = [["method", "arithmetic", "microbatch", "milliseconds", "temporary MB"]]
        for candidate in self.candidates:
            mechanism, memory = candidate.mechanism, candidate.temporary_bytes
            size = str(mechanism.microbatch_size or "by shapes")
            milliseconds = f"{1e3 * candidate.seconds:.1f}"
            megabytes = "unknown" if memory is None else f"{memory / 1e6:.1f}"
            names = [str(mechanism.method), str(mechanism.arithmetic)]
            rows.append([*names, size, milliseconds, megabytes])
        return _plain_text.table(rows, "<<>>>")


def tune(
    trainer: DPTrainer,
    params: PyTree,
    example: PyTree,
    *,
    sizes: Sequence[int | None] = (None, 4, 16, 64),
    rounds: int = 3,
) -> Tuning:
    """Times a step with each proved engine and microbatch size, on this device.

    Only shapes and dtypes matter: every array is made of zeros, so that private data is
    not needed and nothing is released. The default choice of `DPSGD` is usually within
    a quarter of the fastest. This function finds out.

    >>> mechanism = DPSGD(
    ...     num_examples=64,
    ...     expected_batch_size=16,
    ...     iterations=3,
    ...     l2_clip_norm=1.0,
    ...     noise_multiplier=1.0,
    ... )
    >>> trainer = DPTrainer(
    ...     mechanism=mechanism,
    ...     loss_fn=lambda w, x: jnp.mean((x @ w) ** 2),
    ...     optimizer=optax.sgd(0.1),
    ...     policy="float32",
    ... )
    >>> tuning = tune(trainer, jnp.zeros(5), jnp.zeros(5), sizes=(None, 8))
    >>> len(tuning.candidates), tuning.best.l2_clip_norm
    (4, 1.0)

    Args:
      trainer: the trainer whose mechanism is to be chosen.
      params: the parameters, or their shapes (`jax.ShapeDtypeStruct`).
      example: one row of the dataset, or its shapes: arrays without the axis of
        examples.
      sizes: the microbatch sizes; None stands for the size that shapes determine. Sizes
        above the largest batch are left out.
      rounds: how often each step is timed, in turn.

    Raises:
      ValueError: if no candidate is left, and as `DPTrainer.train_step`.
    """
    _validate.instance(DPTrainer, "Use dpmp.DPTrainer(...).", trainer=trainer)
    rounds = _validate.positive_integer(rounds=rounds, fix="Use 3.")
    _validate.instance(Sequence, "Use (None, 8), for example.", sizes=sizes)
    check = _validate.optional(_validate.positive_integer)
    sizes = [check(size=size) for size in sizes]
    mechanisms = list(_mechanisms(trainer.mechanism, sizes))
    if not mechanisms:
        _validate.fail("there must be a size to measure. Use (None, 8).", sizes=sizes)
    example = as_device_dtypes(example)
    names = "loss_fn", "optimizer", "policy", "uses_prng_key", "loss_scale"
    options = {name: getattr(trainer, name) for name in names}
    programs = [compiled_step(x, params, example, **options) for x in mechanisms]
    calls = {i: functools.partial(_run, x) for i, x in enumerate(programs)}
    seconds = _timing.in_turn(calls, rounds)
    candidates = []
    for i, mechanism in enumerate(mechanisms):
        analysis = programs[i].memory_analysis()
        memory = analysis and analysis.temp_size_in_bytes
        candidates.append(Candidate(mechanism, statistics.median(seconds[i]), memory))
    return Tuning(tuple(sorted(candidates, key=lambda x: x.seconds)))


def _mechanisms(mechanism: DPSGD, sizes: Sequence[int | None]) -> Iterator[DPSGD]:
    """Yields the mechanism with each engine that has a proof, and each size."""
    largest = mechanism.batch_selection_strategy.truncated_batch_size or math.inf
    for size, method in itertools.product(sizes, METHODS):
        if size is None or size <= largest:
            with contextlib.suppress(_validate.RefusedError):
                yield dataclasses.replace(
                    mechanism, method=method, microbatch_size=size
                )


def _run(program: jax.stages.Compiled) -> Any:
    """Runs a step on zeros; its first argument is donated, so all are made anew."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), program.args_info)
    args, kwargs = zeros
    return program(*args, **kwargs)
