"""What memory a training step takes, line by line, as it follows from shapes alone.

Some parts are there throughout the step. The others take turns: a copy of the
parameters to compute with and the gradients of examples, then noise, then random bits
for rounding. So the step takes the first ones and the largest of these turns.

Activations are not counted, nor is what book-keeping records in place of gradients.
Both depend on what the compiler makes of the loss, and only the compiler can tell.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.engines._methods import check_method
from dpmp.engines._signature import Signature
from dpmp.numerics import _packing
from dpmp.numerics._arithmetic import default_name, parse
from dpmp.precision import Policy

# When a part is in memory: the first for the whole step, the others in turn.
_ALWAYS, _GRADIENTS, _NOISE, _ROUNDING = "throughout", "clipping", "noise", "rounding"

_NOT_COUNTED = (
    "Activations, and what book-keeping records, are not counted: only the compiler "
    "knows them\n(dpmp.memory.compiled_memory)."
)


@dataclass(frozen=True)
class MemoryLine:
    """One part of what a step takes.

    Attributes:
      name: the name of the part.
      num_bytes: its size.
      moment: when it is in memory.
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
        total = MemoryLine("total", self.total, self.moment, "the most at once")
        rows = [f"{'':24}{'MB':>12}{'B/parameter':>13}  {'when':10}  what"]
        rows += [
            f"{line.name:24}{line.num_bytes / 1e6:12.2f}"
            f"{line.num_bytes / self.num_parameters:13.2f}"
            f"  {line.moment:10}  {line.formula}"
            for line in (*self.lines, total)
        ]
        return "\n".join([*rows, _NOT_COUNTED])


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
    """Counts what a step of `DPTrainer` takes, without its activations.

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
      params: arrays, or `jax.ShapeDtypeStruct`s.
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
    policy = Policy.from_name(policy) if isinstance(policy, str) else policy
    check_method(method)
    sums = parse(arithmetic or default_name(method), method=method)
    size = _examples_at_once(params, batch, microbatch_size)
    params, batch = jax.eval_shape(
        lambda params, batch: (policy.cast_to_param(params), batch), params, batch
    )
    num_stacked = size if method == "per_example" else 0
    parts = _parts(params, batch, policy, optimizer, num_stacked, sums.bytes_per_entry)
    lines = tuple(MemoryLine(*part) for part in parts if part[1])
    return MemoryEstimate(lines, _num_entries(params))


def _examples_at_once(
    params: PyTree, batch: PyTree, microbatch_size: int | None
) -> int:
    """The size of a microbatch, or of the batch."""
    signature = Signature.parse(argnums=0, batch_argnums=1)
    batch_size = signature.batch_size((params, batch))
    if microbatch_size is None:
        return batch_size
    size = _validate.positive_integer(
        microbatch_size=microbatch_size, fix="Leave it out for the whole batch."
    )
    _validate.require(
        batch_size % size == 0,
        "microbatch_size must divide the batch size",
        microbatch_size=microbatch_size,
        batch_size=batch_size,
        fix="Pad the batch, or use a divisor.",
    )
    return size


def _parts(
    params: PyTree,
    batch: PyTree,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    num_stacked: int,
    bytes_of_entry: int,
) -> list[tuple[str, int, str, str]]:
    """The fields of every line, also of those that take nothing."""
    opt_state = jax.eval_shape(
        lambda params: optimizer.init(policy.cast_to_update(params)), params
    )
    copy = jax.eval_shape(policy.cast_to_compute, params)
    inputs = jax.eval_shape(policy.cast_inputs, batch)
    copied = _bytes_of_copies((copy, inputs), (params, batch))
    stack = num_stacked * _num_bytes(copy)
    total = bytes_of_entry * _num_entries(params)
    rounded = _most_rounded_at_once(params, policy)
    dtype = policy.compute_dtype.name
    return [
        ("master parameters", _num_bytes(params), _ALWAYS, policy.param_dtype.name),
        ("optimizer state", _num_bytes(opt_state), _ALWAYS, "optimizer.init(params)"),
        ("batch", _num_bytes(batch), _ALWAYS, "of the padded size"),
        ("sum of gradients", total, _ALWAYS, f"{bytes_of_entry} B for a parameter"),
        ("compute copy", copied, _GRADIENTS, f"parameters and inputs in {dtype}"),
        ("per-example gradients", stack, _GRADIENTS, f"of {num_stacked}, in {dtype}"),
        ("partial sums", total, _GRADIENTS, "about as much as the sum"),
        ("noise", 8 * _num_entries(params), _NOISE, "noise and noisy gradients"),
        ("random bits", 16 * rounded, _ROUNDING, "16 B for what is rounded at once"),
    ]


def _bytes_of_copies(new: PyTree, old: PyTree) -> int:
    """The size of the arrays that are in another dtype than before."""
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    return _num_bytes([x for x, before in pairs if x.dtype != before.dtype])


def _most_rounded_at_once(params: PyTree, policy: Policy) -> int:
    """The largest number of parameters that are rounded with one draw of bits."""
    rounded = [x.shape for x in jax.tree.leaves(params) if x.dtype == jnp.bfloat16]
    if not policy.stochastic_rounding:
        return 0
    draws = _packing.draws(rounded, [None] * len(rounded))
    return max((math.prod(draw.shape) for draw in draws), default=0)


def _num_entries(tree: PyTree) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def _num_bytes(tree: PyTree) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
