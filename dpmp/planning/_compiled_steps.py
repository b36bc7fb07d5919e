"""Compiles training steps without running them on data: their memory and their time."""

import contextlib
import dataclasses
import functools
import itertools
import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpmp import _plain_text, _timing, _validate
from dpmp._arrays import as_device_dtypes
from dpmp._typing import PyTree
from dpmp.engines import METHODS, Signature
from dpmp.mechanism import DPSGD
from dpmp.numerics import num_entries
from dpmp.precision import Policy
from dpmp.training import DPTrainer


@dataclass(frozen=True)
class CompiledMemory:
    """The compiler's report on a step.

    Attributes:
      arguments: bytes of its arguments.
      outputs: bytes of its results.
      aliased: bytes of the results that reuse the buffers of donated arguments.
      temporary: bytes that it allocates in addition, while it runs.
    """

    arguments: int
    outputs: int
    aliased: int
    temporary: int

    @property
    def total(self) -> int:
        """All bytes, with donated buffers counted once."""
        return self.arguments + self.outputs - self.aliased + self.temporary

    def __str__(self) -> str:
        return f"{self.total / 1e6:.2f} MB, {self.temporary / 1e6:.2f} of it temporary"


def compiled_memory(
    loss_fn: Callable[..., jax.Array],
    params: PyTree,
    batch: PyTree,
    *,
    policy: Policy | str,
    optimizer: optax.GradientTransformation,
    method: str | None = None,
    microbatch_size: int | None = None,
    arithmetic: str | None = None,
) -> CompiledMemory:
    """Compiles a training step for this device, and returns the compiler's figures.

    The step is that of `DPTrainer`. Nothing is run or allocated, so the model may be
    larger than the device. The figures hold for this device and this version of the
    compiler.

    >>> shape = jax.ShapeDtypeStruct
    >>> compiled = compiled_memory(
    ...     lambda w, x: ((x @ w) ** 2).mean(),
    ...     shape((1000,), "float32"),
    ...     shape((8, 1000), "float32"),
    ...     policy="mixed_bfloat16",
    ...     optimizer=optax.sgd(1e-3),
    ...     method="per_example",
    ... )
    >>> compiled.temporary > 8 * 2 * 1000  # gradients of 8 examples in bfloat16
    True

    Args:
      loss_fn: `loss_fn(params, batch)`, as in `clipped_grad`. Arrays that it closes
        over count as arguments of the step.
      params: as in `estimate_memory`, and so are all arguments below.
      batch: arrays or shapes. The step is compiled for the padded size of `DPSGD`.
      policy: the dtypes.
      optimizer: any optax transformation.
      method: as in `DPSGD`, and so are the arguments below.
      microbatch_size: the number of examples at a time.
      arithmetic: the arithmetic of the sum.

    Raises:
      ValueError: as `clipped_grad`, and where the compiler reports nothing.
    """
    batch = as_device_dtypes(batch)
    size = batch_size_of(params, batch, microbatch_size)
    mechanism = DPSGD(
        num_examples=size,
        expected_batch_size=size,
        truncated_batch_size=size,
        iterations=1,
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        num_parameters=max(1, num_entries(params)),
        method=method,
        microbatch_size=microbatch_size,
        arithmetic=arithmetic,
    )
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    options: Any = {"loss_fn": loss_fn, "optimizer": optimizer, "policy": policy}
    compiled = compiled_step(mechanism, params, example, **options)
    analysis = compiled.memory_analysis()
    if analysis is None:
        _validate.fail(
            "the compiler must report the memory of a program",
            backend=jax.default_backend(),
            fix="Use estimate_memory alone.",
        )
    return CompiledMemory(
        analysis.argument_size_in_bytes,
        analysis.output_size_in_bytes,
        analysis.alias_size_in_bytes,
        analysis.temp_size_in_bytes,
    )


def compiled_step(
    mechanism: DPSGD, params: PyTree, example: PyTree, **options: Any
) -> jax.stages.Compiled:
    """A step of `DPTrainer` with these options, compiled for a full batch."""
    with warnings.catch_warnings(action="ignore"):  # about float16 and float8
        trainer = DPTrainer(mechanism=mechanism, **options)
    size = mechanism.padded_batch_size
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((size, *jnp.shape(x)), jnp.result_type(x)),
        example,
    )
    return trainer.lower(jax.eval_shape(trainer.init, params), batch).compile()


def largest_microbatch(
    loss_fn: Callable[..., jax.Array],
    params: PyTree,
    batch: PyTree,
    *,
    num_bytes: float,
    **options: Any,
) -> tuple[int, CompiledMemory] | None:
    """Finds the largest microbatch with which a training step fits into `num_bytes`.

    Steps are compiled for microbatches of the whole batch, of half of it, and so on.

    Args:
      loss_fn: as in `compiled_memory`, and so are `params` and `batch`.
      params: arrays or shapes.
      batch: arrays or shapes.
      num_bytes: the memory that a step may take.
      **options: the other arguments of `compiled_memory`.

    Returns:
      The size of the microbatch and the compiler's figures, or None if not even the
      smallest of these microbatches fits.

    Raises:
      ValueError: as `compiled_memory`, and if `num_bytes` is not a positive number.
    """
    num_bytes = _validate.positive(num_bytes=num_bytes, fix="Use 16e9, for example.")
    batch = as_device_dtypes(batch)
    size = batch_size_of(params, batch, None)
    while True:
        compiled = compiled_memory(
            loss_fn, params, batch, microbatch_size=size, **options
        )
        if compiled.total <= num_bytes:
            return size, compiled
        if size % 2:
            return None
        size //= 2


def batch_size_of(params: PyTree, batch: PyTree, microbatch_size: int | None) -> int:
    """The number of examples in a batch, which microbatches must divide."""
    signature = Signature.parse(argnums=0, batch_argnums=1)
    batch_size = signature.batch_size((params, batch))
    if microbatch_size is not None:
        microbatch_size = _validate.positive_integer(
            microbatch_size=microbatch_size, fix="Leave it out for the whole batch."
        )
        if batch_size % microbatch_size != 0:
            _validate.fail(
                "microbatch_size must divide the batch size",
                microbatch_size=microbatch_size,
                fix="Pad the batch, or use a divisor.",
            )
    return batch_size


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
