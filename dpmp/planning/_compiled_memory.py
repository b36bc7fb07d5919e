"""Compiles a training step without running it; reads the figures of the compiler."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpmp import _validate
from dpmp._arrays import as_device_dtypes
from dpmp._typing import PyTree
from dpmp.engines import Signature
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
