"""What memory a training step takes, line by line, before anything is allocated.

    arguments      master parameters, optimizer state, batch, keys
    while it runs  copies to compute with, activations, per-example gradients or
                   records, running sums, noise

A step needs most at one of these moments: while it computes gradients, while it clips
and adds them up, while it draws noise, or while it rounds parameters at random. The
estimate is for the worst.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import optax

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.precision import Policy
from dpmp.tools.memory._step import Step


@dataclass(frozen=True)
class MemoryLine:
    """One part of what a step takes.

    Attributes:
      name: of the part.
      num_bytes: of it, at the moment when the step takes most.
      formula: where that comes from, in words.
    """

    name: str
    num_bytes: int
    formula: str


@dataclass(frozen=True)
class CompiledMemory:
    """What a compiler says of a compiled step, in bytes.

    Attributes:
      arguments: of its inputs.
      outputs: of its results.
      aliased: how many of these are in the buffers of donated arguments.
      temporary: what it allocates besides.
    """

    arguments: int
    outputs: int
    aliased: int
    temporary: int

    @property
    def total(self) -> int:
        """All of it, donated buffers counted once."""
        return self.arguments + self.outputs - self.aliased + self.temporary


@dataclass(frozen=True)
class MemoryEstimate:
    """What was estimated; `str` gives a table.

    Attributes:
      lines: the parts.
      num_parameters: how many entries the parameters have.
      moment: when the step takes most.
    """

    lines: tuple[MemoryLine, ...]
    num_parameters: int
    moment: str

    @property
    def total(self) -> int:
        """The sum of all lines, in bytes."""
        return sum(line.num_bytes for line in self.lines)

    @property
    def by_name(self) -> dict[str, int]:
        """Bytes of each line."""
        return {line.name: line.num_bytes for line in self.lines}

    def compare(self, compiled: CompiledMemory) -> float:
        """The estimate over the compiler's own figure: 1 if they agree."""
        return self.total / compiled.total

    def __str__(self) -> str:
        rows = [f"{'':28}{'MB':>12}{'B/parameter':>13}"]
        total = MemoryLine("total", self.total, f"most is needed {self.moment}")
        rows += [
            f"{line.name:28}{line.num_bytes / 1e6:12.2f}"
            f"{line.num_bytes / self.num_parameters:13.2f}  {line.formula}"
            for line in (*self.lines, total)
        ]
        return "\n".join(rows)


def estimate_memory(
    loss_fn: Callable[..., jax.Array],
    params: PyTree,
    batch: PyTree,
    *,
    policy: Policy | str,
    optimizer: optax.GradientTransformation,
    method: str | None = "per_example",
    microbatch_size: int | None = None,
    arithmetic: str | None = None,
) -> MemoryEstimate:
    """Estimates what one step of `DPTrainer` takes, without allocating anything.

    Activations and records are followed through the program as it is traced, as XLA's
    CPU compiler stores them (`_liveness.py` says what is modelled). What clipping and
    noise take is counted. Compilers for other devices are not modelled: they keep
    16-bit products as they are, and look for an order that takes less.

    With master parameters and Adam in float32, the lines "master parameters" (4),
    "optimizer state" (8) and "sum of gradients" (4) are the 16 bytes per parameter that
    mixed-precision training is known to take; the copy in bfloat16 is 2 more.

    >>> shape = jax.ShapeDtypeStruct
    >>> estimate = estimate_memory(
    ...     lambda w, x: ((x @ w) ** 2).mean(),
    ...     shape((1000, 1000), "float32"),
    ...     shape((64, 1000), "float32"),
    ...     policy="mixed_bfloat16",
    ...     optimizer=optax.adam(1e-3),
    ...     microbatch_size=8,
    ... )
    >>> estimate.by_name["per-example gradients"]
    16000000

    Args:
      loss_fn: as in `DPTrainer`; without privacy, it is given the batch at once.
      params: arrays, or `jax.ShapeDtypeStruct`s.
      batch: the same, with a leading axis of the padded batch size.
      policy: dtypes, or the name of a preset.
      optimizer: any optax transformation.
      method: the gradient engine, as in `DPSGD`; None for training without privacy.
      microbatch_size: how many examples at a time; None for all.
      arithmetic: of the sum, as in `DPSGD`; None for "exact", or "bounded" for
        book-keeping. Without privacy sums are float32.

    Returns:
      A `MemoryEstimate`.

    Raises:
      ValueError: for an unknown method, arithmetic or policy, a microbatch size that
        does not divide the batch size, and a loss that is not a scalar.
    """
    step = Step.from_arguments(
        loss_fn, params, batch, policy, optimizer, method, microbatch_size, arithmetic
    )
    moments = [step.gradient_lines()]
    if method == "per_example":
        moments.append(step.clipping_lines())
    if method is not None:
        moments.append(step.noise_lines())
    if step.policy.stochastic_rounding:
        moments.append(step.rounding_lines())
    moment, lines = max(moments, key=lambda x: sum(n for _, n, _ in x[1]))
    used = [MemoryLine(*line) for line in (*step.argument_lines(), *lines) if line[1]]
    return MemoryEstimate(tuple(used), step.num_parameters, moment)


def compiled_memory(
    loss_fn: Callable[..., jax.Array],
    params: PyTree,
    batch: PyTree,
    *,
    policy: Policy | str,
    optimizer: optax.GradientTransformation,
    method: str | None = "per_example",
    microbatch_size: int | None = None,
    arithmetic: str | None = None,
) -> CompiledMemory:
    """Compiles the step for this device, without running it, and asks the compiler.

    Args:
      loss_fn: as in `estimate_memory`, as are all others.
      params: arrays or shapes.
      batch: arrays or shapes.
      policy: dtypes.
      optimizer: any optax transformation.
      method: the gradient engine.
      microbatch_size: how many examples at a time.
      arithmetic: of the sum.

    Returns:
      What the compiler reports.

    Raises:
      ValueError: as `estimate_memory`, and where the compiler reports nothing.
    """
    step = Step.from_arguments(
        loss_fn, params, batch, policy, optimizer, method, microbatch_size, arithmetic
    )
    analysis = step.lower().compile().memory_analysis()
    if analysis is None:
        _validate.fail(
            "the compiler must report what memory a program takes",
            backend=jax.default_backend(),
            fix="Use estimate_memory alone.",
        )
    return CompiledMemory(
        analysis.argument_size_in_bytes,
        analysis.output_size_in_bytes,
        analysis.alias_size_in_bytes,
        analysis.temp_size_in_bytes,
    )
