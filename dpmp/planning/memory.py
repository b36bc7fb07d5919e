"""The memory of a training step, and the operations of clipped sums.

`estimate_memory` counts the memory that follows from shapes alone, part by part.
`compiled_memory` compiles a step without running it, and reads the compiler's figures.
`largest_microbatch` finds the one that fits into some memory.
`accumulation_overhead` counts the operations that clipping adds to training, and
`measure_accumulation_share` times them. `python -m dpmp memory` shows memory and
operations for a transformer.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpmp import _plain_text, _validate
from dpmp._typing import PyTree
from dpmp.engines import Signature, check_method
from dpmp.mechanism import DPSGD
from dpmp.numerics import default_arithmetic, packing, parse_arithmetic
from dpmp.planning._operations import (
    AccumulationOverhead,
    accumulation_overhead,
    measure_accumulation_share,
)
from dpmp.precision import Policy
from dpmp.training import DPTrainer

__all__ = [
    "AccumulationOverhead",
    "CompiledMemory",
    "MemoryEstimate",
    "MemoryLine",
    "accumulation_overhead",
    "compiled_memory",
    "estimate_memory",
    "largest_microbatch",
    "measure_accumulation_share",
]

# The moment of parts that are in memory for the whole step.
_ALWAYS = "throughout"


@dataclass(frozen=True)
class MemoryLine:
    """One part of the memory of a step.

    Attributes:
      name: the name of the part.
      num_bytes: its size.
      moment: when it is in memory: "throughout", or one of the turns "clipping",
        "noise" and "rounding".
      formula: where the size comes from, in words.
    """

    name: str
    num_bytes: int
    moment: str
    formula: str


@dataclass(frozen=True)
class MemoryEstimate:
    """The account of a step; `str` gives a table.

    Attributes:
      lines: the parts that take any memory.
      num_parameters: the number of entries of the parameters.
    """

    lines: tuple[MemoryLine, ...]
    num_parameters: int

    @property
    def moment(self) -> str:
        """The moment at which the parts take most."""
        moments = [x.moment for x in self.lines if x.moment != _ALWAYS]
        return max(moments, key=self._bytes_at)

    @property
    def total(self) -> int:
        """The bytes of all parts that are in memory at this moment."""
        return self._bytes_at(_ALWAYS) + self._bytes_at(self.moment)

    @property
    def by_name(self) -> dict[str, int]:
        """The bytes of each line."""
        return {line.name: line.num_bytes for line in self.lines}

    def _bytes_at(self, moment: str) -> int:
        return sum(x.num_bytes for x in self.lines if x.moment == moment)

    def __str__(self) -> str:
        rows = [["", "MB", "B/parameter", "in memory", "size"]]
        total = MemoryLine("total", self.total, self.moment, "the most at any time")
        for line in (*self.lines, total):
            megabytes = f"{line.num_bytes / 1e6:.2f}"
            share = f"{line.num_bytes / self.num_parameters:.2f}"
            rows.append([line.name, megabytes, share, line.moment, line.formula])
        not_counted = (
            "Activations and the values that book-keeping records are not counted: "
            "only the compiler knows their size (dpmp.memory.compiled_memory)."
        )
        table = _plain_text.table(rows, "<>><<")
        return f"{table}\n{_plain_text.paragraph(not_counted)}"


def estimate_memory(
    params: PyTree,
    batch: PyTree,
    *,
    policy: Policy | str,
    optimizer: optax.GradientTransformation,
    method: str = "per_example",
    microbatch_size: int | None = None,
    arithmetic: str | None = None,
) -> MemoryEstimate:
    """Counts the memory of a step of `DPTrainer`, without its activations.

    Some parts are in memory throughout the step. The others take turns: first a copy of
    the parameters to compute with and per-example gradients, then noise, then random
    bits for rounding. The step takes the permanent parts and the largest turn.

    With master parameters and Adam in float32, the lines "master parameters" (4),
    "optimizer state" (8) and "sum of gradients" (4) are the 16 bytes per parameter that
    mixed-precision training is known to take. The copy in bfloat16 takes 2 more.

    >>> shape = jax.ShapeDtypeStruct
    >>> estimate = estimate_memory(
    ...     shape((1000, 1000), "float32"),
    ...     shape((64, 1000), "float32"),
    ...     policy="mixed_bfloat16",
    ...     optimizer=optax.adam(1e-3),
    ...     microbatch_size=8,
    ... )
    >>> estimate.by_name["per-example gradients"]
    16000000

    Args:
      params: arrays, or their shapes (`jax.ShapeDtypeStruct`).
      batch: arrays or shapes, with a leading axis of the padded batch size.
      policy: the dtypes, or the name of a preset.
      optimizer: any optax transformation.
      method: the gradient engine, as in `clipped_grad`.
      microbatch_size: as in `clipped_grad`.
      arithmetic: as in `DPSGD`; None for the default of the engine.

    Returns:
      The account.

    Raises:
      ValueError: for a policy, method or arithmetic that is unknown or does not go with
        the others, arrays of a batch that have different numbers of examples, and a
        `microbatch_size` that does not divide this number.
    """
    policy = Policy.parse(policy)
    check_method(method)
    entry = parse_arithmetic(
        arithmetic or default_arithmetic(method), method=method
    ).bytes_per_entry
    size = _batch_size(params, batch, microbatch_size)
    num_stacked = (microbatch_size or size) if method == "per_example" else 0

    def trees(params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        params = policy.cast_to_param(params)
        copies = policy.cast_to_compute(params), policy.cast_inputs(batch)
        return (params, batch), copies, optimizer.init(policy.cast_to_update(params))

    given, copies, opt_state = jax.eval_shape(trees, params, batch)
    params, name = given[0], policy.compute_dtype.name
    pairs = zip(jax.tree.leaves(copies), jax.tree.leaves(given), strict=True)
    copied = _num_bytes([x for x, old in pairs if x.dtype != old.dtype])
    num_parameters = sum(x.size for x in jax.tree.leaves(params))
    total, noise = entry * num_parameters, 8 * num_parameters
    stack = num_stacked * _num_bytes(copies[0])
    # Random bits are drawn for some of the parameters at a time.
    leaves = jax.tree.leaves(params) if policy.stochastic_rounding else []
    rounded = [x.shape for x in leaves if x.dtype == jnp.bfloat16]
    draws = packing.draws(rounded, [None] * len(rounded))
    bits = 16 * max((math.prod(draw.shape) for draw in draws), default=0)
    parts = [
        ("master parameters", _num_bytes(params), _ALWAYS, policy.param_dtype.name),
        ("optimizer state", _num_bytes(opt_state), _ALWAYS, "optimizer.init(params)"),
        ("batch", _num_bytes(given[1]), _ALWAYS, "of the padded size"),
        ("sum of gradients", total, _ALWAYS, f"{entry} B for each parameter"),
        ("compute copy", copied, "clipping", f"parameters and inputs in {name}"),
        ("per-example gradients", stack, "clipping", f"of {num_stacked}, in {name}"),
        ("partial sums", total, "clipping", "about as much as the sum"),
        ("noise", noise, "noise", "noise and noisy gradients"),
        ("random bits", bits, "rounding", "16 B for each entry rounded at once"),
    ]
    lines = tuple(MemoryLine(*part) for part in parts if part[1])
    return MemoryEstimate(lines, num_parameters)


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
    method: str = "per_example",
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
    ... )
    >>> compiled.temporary > 8 * 2 * 1000  # gradients of 8 examples in bfloat16
    True

    Args:
      loss_fn: `loss_fn(params, batch)`, as in `clipped_grad`. Arrays that it closes
        over count as arguments of the step.
      params: as in `estimate_memory`, and so are all arguments below.
      batch: arrays or shapes. If `DPSGD` pads such a batch, the padded one is compiled.
      policy: the dtypes.
      optimizer: any optax transformation.
      method: the gradient engine.
      microbatch_size: the number of examples at a time.
      arithmetic: the arithmetic of the sum.

    Raises:
      ValueError: as `clipped_grad`, and where the compiler reports nothing.
    """
    policy = Policy.parse(policy)
    size = _batch_size(params, batch, microbatch_size)
    num_parameters = sum(math.prod(jnp.shape(x)) for x in jax.tree.leaves(params))
    mechanism = DPSGD(
        num_examples=size,
        expected_batch_size=size,
        truncated_batch_size=size,
        iterations=1,
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        num_parameters=max(1, num_parameters),
        method=method,
        microbatch_size=microbatch_size,
        arithmetic=arithmetic,
    )
    with warnings.catch_warnings(action="ignore"):  # those of float16 and of float8
        trainer = DPTrainer(
            mechanism=mechanism, loss_fn=loss_fn, optimizer=optimizer, policy=policy
        )
    padded_size = mechanism.padded_batch_size
    padded = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((padded_size, *x.shape[1:]), x.dtype), batch
    )
    lowered = trainer.lower(jax.eval_shape(trainer.init, params), padded)
    analysis = lowered.compile().memory_analysis()
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


def largest_microbatch(
    loss_fn: Callable[..., jax.Array],
    params: PyTree,
    batch: PyTree,
    *,
    num_bytes: float,
    **options: Any,
) -> tuple[int, CompiledMemory] | None:
    """Finds the largest microbatch with which a training step fits into some memory.

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
    size = _batch_size(params, batch, None)
    while True:
        compiled = compiled_memory(
            loss_fn, params, batch, microbatch_size=size, **options
        )
        if compiled.total <= num_bytes:
            return size, compiled
        if size % 2:
            return None
        size //= 2


def _batch_size(params: PyTree, batch: PyTree, microbatch_size: int | None) -> int:
    """The number of examples in a batch, which microbatches must divide."""
    signature = Signature.parse(argnums=0, batch_argnums=1)
    batch_size = signature.batch_size((params, batch))
    if microbatch_size is not None:
        microbatch_size = _validate.positive_integer(
            microbatch_size=microbatch_size, fix="Leave it out for the whole batch."
        )
        _validate.require(
            batch_size % microbatch_size == 0,
            "microbatch_size must divide the batch size",
            microbatch_size=microbatch_size,
            batch_size=batch_size,
            fix="Pad the batch, or use a divisor.",
        )
    return batch_size


def _num_bytes(tree: PyTree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
