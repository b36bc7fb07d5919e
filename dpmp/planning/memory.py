"""The memory of a training step.

`estimate_memory` counts the memory that follows from shapes alone, part by part.
`compiled_memory` compiles a step without running it, and reads the compiler's figures.
`largest_microbatch` finds the largest microbatch that fits into a given memory.
`python -m dpmp plan` shows the memory of language models.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from dpmp import _plain_text, _validate
from dpmp._arrays import as_device_dtypes
from dpmp._typing import PyTree
from dpmp.engines import check_method
from dpmp.numerics import default_arithmetic, default_method, packing, parse_arithmetic
from dpmp.planning._compiled_steps import (
    CompiledMemory,
    batch_size_of,
    compiled_memory,
    largest_microbatch,
)
from dpmp.precision import Policy
from dpmp.strategies import Strategy

__all__ = [
    "CompiledMemory",
    "MemoryEstimate",
    "MemoryLine",
    "compiled_memory",
    "estimate_memory",
    "largest_microbatch",
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
    """The memory of a step, part by part; `str` gives a table.

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
        return sum(x.num_bytes for x in self.at_peak)

    @property
    def at_peak(self) -> list[MemoryLine]:
        """The parts that are in memory at this moment; `total` is their sum."""
        return [x for x in self.lines if x.moment in (_ALWAYS, self.moment)]

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
            "Activations, and what book-keeping caches of them, are not counted: only "
            "the compiler knows their size (dpmp.memory.compiled_memory)."
        )
        table = _plain_text.table(rows, "<>><<")
        return f"{table}\n{_plain_text.paragraph(not_counted)}"


def estimate_memory(
    params: PyTree,
    batch: PyTree,
    *,
    policy: Policy | str,
    optimizer: optax.GradientTransformation,
    method: str | None = None,
    microbatch_size: int | None = None,
    arithmetic: str | None = None,
    strategy: Strategy | None = None,
) -> MemoryEstimate:
    """Counts the memory of a step of `DPTrainer`, without its activations.

    Some parts are in memory throughout the step. The other parts take turns: first the
    compute copy of the parameters and per-example gradients, then noise, then random
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
    ...     method="per_example",
    ...     microbatch_size=8,
    ... )
    >>> estimate.by_name["per-example gradients"]
    16000000

    Args:
      params: arrays, or their shapes (`jax.ShapeDtypeStruct`).
      batch: arrays or shapes, with a leading axis of the padded batch size.
      policy: the dtypes, or the name of a preset.
      optimizer: any optax transformation.
      method: the gradient engine, as in `DPSGD`.
      microbatch_size: as in `clipped_grad`. None counts the whole batch at once.
      arithmetic: as in `DPSGD`; None for the default of the engine.
      strategy: as in `DPSGD`; None for independent noise.

    Returns:
      The estimate.

    Raises:
      ValueError: if a policy, method or arithmetic is unknown or contradicts the
        others, if the arrays of a batch have different numbers of examples, or if
        `microbatch_size` does not divide this number.
    """
    policy = Policy.parse(policy)
    fix = "Use optax.adam(1e-3), for example."
    _validate.instance(optax.GradientTransformation, fix, optimizer=optimizer)
    method = method or default_method(arithmetic, has_fixed_slots=True)
    check_method(method)
    entry = parse_arithmetic(
        arithmetic or default_arithmetic(method), method=method
    ).bytes_per_entry
    if not all(hasattr(x, "shape") for x in jax.tree.leaves((params, batch))) or any(
        x is None for x in (params, batch)
    ):
        _validate.fail(
            "params and batch must be trees of arrays, or of their shapes. Use "
            'jax.ShapeDtypeStruct((64, 1000), "float32"), for example; for a number '
            "of parameters, use `python -m dpmp plan --parameters`.",
            params=type(params).__name__,
            batch=type(batch).__name__,
        )
    batch = as_device_dtypes(batch)
    size = batch_size_of(params, batch, microbatch_size)
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
    stored = strategy.stored_steps if strategy else 0
    total, earlier = entry * num_parameters, 4 * stored * num_parameters
    noise = (16 if strategy and strategy.bands > 1 else 8) * num_parameters
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
        ("earlier noise", earlier, _ALWAYS, f"4 B for each of {stored} steps"),
        ("compute copy", copied, "clipping", f"parameters and inputs in {name}"),
        ("per-example gradients", stack, "clipping", f"of {num_stacked}, in {name}"),
        ("partial sums", total, "clipping", "about as much as the sum"),
        ("noise", noise, "noise", "noise and noisy gradients"),
        ("random bits", bits, "rounding", "16 B for each entry rounded at once"),
    ]
    lines = tuple(MemoryLine(*part) for part in parts if part[1])
    return MemoryEstimate(lines, num_parameters)


def _num_bytes(tree: PyTree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
