"""Float sums in an order we control, with a bound on what their rounding costs.

What rounding can do to a sum follows from the order of its additions, which
`numerics/_reduction.py` fixes.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import _meshes, _validate
from dpmp._typing import PyTree
from dpmp.numerics import _reduction
from dpmp.numerics._stored import StoredArray

UNIT_ROUNDOFF = 2.0**-24

_SMALLEST_NORMAL = 2.0**-126


class DoubleWord(NamedTuple):
    """An unevaluated sum `hi + lo` of two float32 arrays, about 48 bits wide.

    It is what `clipped_grad(..., accumulator="float32x2")` returns for each leaf.
    Add the noise before rounding to float32 (`dpmp.noise_addition` does): rounded
    alone, the sum loses what the second word was for. Do not add two of them (`psum`
    would add high and low words apart): nothing covers what that rounds.
    """

    hi: jax.Array
    lo: jax.Array


@dataclass(frozen=True)
class Accumulator:
    """The arithmetic in which clipped gradients are summed over a batch.

    Attributes:
      name: as users spell it.
      dtype: of the output (of both words for "float32x2").
      lift: from float32 or wider terms to the accumulator's representation.
      add: the sum of two values in that representation.
      add_block: the sum of a few contributions, float32 or wider, in that
        representation.
      unit_roundoff: bound on the relative error of one `add`.
      slack: the share of the clip norm that is set aside for rounding. It is the same
        for all batches: if it depended on their size, one example more would rescale
        all others.
    """

    name: str
    dtype: Any
    lift: Callable[[jax.Array], PyTree]
    add: Callable[[PyTree, PyTree], PyTree]
    add_block: Callable[[list[jax.Array]], PyTree]
    unit_roundoff: float
    slack: float

    def check_batch(self, batch_size: int, microbatch_size: int) -> None:
        """Raises ValueError for a sum whose rounding is not covered."""
        slack = rounding_slack(self, batch_size, microbatch_size)
        _validate.require(
            slack <= self.slack,
            f"rounding may cost a sum {self.slack:.2g} of the clip norm",
            cost=f"{slack:.2g}",
            batch_size=batch_size,
            microbatch_size=microbatch_size,
            accumulator=self.name,
            fix='Use accumulator="float32x2" (in DPSGD: arithmetic="float32x2"), or '
            "larger microbatches.",
        )

    def check_mode(self) -> None:
        """Raises ValueError where jax would silently narrow this accumulator."""
        _validate.check_x64(self.dtype, "float64 sums")

    def check_not_mapped(self) -> None:
        """Raises ValueError where sums of other devices would be added to this one."""
        _meshes.check_not_mapped(f"{self.name} sums")

    def targets(
        self, targets: list[tuple[float, float]], num_entries: list[int]
    ) -> list[tuple[float, float]]:
        """The norms to clip to, and the largest coefficients, that leave the slack."""
        del num_entries
        return [(bound / (1 + self.slack), cap) for bound, cap in targets]

    def admit(
        self, stack: list[StoredArray], coef: jax.Array, keep: jax.Array, group: int
    ) -> jax.Array:
        """Which examples contribute: those that are kept."""
        del stack, coef, group
        return keep

    def contribution(
        self, row: jax.Array, coef: jax.Array, zero: jax.Array
    ) -> jax.Array:
        """What an example adds to the sum: (n,), from its entries and coefficient."""
        del zero
        return coef.astype(row.dtype) * row

    def finish(self, total: PyTree) -> PyTree:
        """The sum as users get it."""
        return total


def get_accumulator(name: str | None, dtype: Any = None) -> Accumulator:
    """The accumulator for a name and an output dtype; either may be None.

    Raises:
      ValueError: for an unknown name, for a dtype narrower than float32, for two
        that contradict each other, and for float64 without 64-bit mode.
    """
    if name is None:
        name = _name_for_dtype(dtype)
    _validate.require(
        name in _ACCUMULATORS,
        f"accumulator must be one of {['exact', *sorted(_ACCUMULATORS)]}",
        accumulator=name,
        fix="Use one of these names.",
    )
    accumulator = _ACCUMULATORS[name]
    _validate.require(
        dtype is None or np.dtype(dtype) == accumulator.dtype,
        "dtype and accumulator must name the same arithmetic",
        dtype=None if dtype is None else np.dtype(dtype).name,
        accumulator=name,
        fix="Leave out one of the two: rounding a wide sum to float32 before the "
        "noise is added would undo it.",
    )
    accumulator.check_mode()
    return accumulator


def _name_for_dtype(dtype: Any) -> str:
    name = "float32" if dtype is None else np.dtype(dtype).name
    _validate.require(
        name in ("float32", "float64"),
        "dtype must be float32 or float64",
        dtype=name,
        fix="Leave dtype out: half-precision norms and sums break the clipping bound, "
        "and only the model's own arithmetic may be narrower.",
    )
    return name


def rounding_slack(
    accumulator: Accumulator, batch_size: int, microbatch_size: int
) -> float:
    """How far rounding can move the sums of two neighbouring batches apart.

    In units of the largest contribution of one example. Every addition errs by at
    most the unit roundoff times the sum of the norms below it, and may err
    differently for the neighbour, since removing an example can move all later ones
    to other slots: twice the sum over all additions.
    """
    size = max(microbatch_size, 1)
    num_microbatches = math.ceil(batch_size / size)
    running_sums = size * (num_microbatches * (num_microbatches + 1) / 2 - 1)
    error = num_microbatches * _reduction.summed_norms(size) + max(running_sums, 0)
    longest_path = _reduction.depth(size) + num_microbatches
    u = accumulator.unit_roundoff
    return 2 * u * error * (1 + u) ** longest_path


class SquaredNorm(NamedTuple):
    """Per-example squared norms of one clipping group, with their rounding error.

    Attributes:
      value: (B,) float32 or wider; the computed sums of squares.
      roundings: the largest number of roundings on any path from an entry to
        `value`: its square (if that is rounded) and the additions above it.
      num_entries: how many squares were added up.
      bound: (B,), what to clip by in place of `value`: an upper bound on the squared
        norm of what is summed for a coefficient of 1, from an engine that has one.
    """

    value: jax.Array
    roundings: int
    num_entries: int
    bound: jax.Array | None = None

    @property
    def underflow(self) -> float:
        """What flushing tiny squares to zero can have taken from `value`."""
        return max(self.num_entries, 1) * _SMALLEST_NORMAL


def squared_norm(stack: list[StoredArray]) -> SquaredNorm:
    """Per-example squared norms over at least one array."""
    value, depth = _reduction.sum_entries(stack, _square, jnp.add)
    # Squares of 16-bit floats are exact in float32, unless they are flushed to zero.
    rounded_square = any(x.dtype.itemsize > 2 for x in stack)
    return SquaredNorm(
        value, depth + rounded_square, sum(x.bits.shape[1] for x in stack)
    )


def _square(rows: jax.Array, start: Any, *operands: jax.Array) -> jax.Array:
    del start, operands
    return jnp.square(rows)


def two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The rounded sum and its exact error (Knuth)."""
    s = a + b
    b_part = s - a
    return s, (a - (s - b_part)) + (b - b_part)


def _fast_two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same for |a| >= |b| (Dekker)."""
    s = a + b
    return s, b - (s - a)


def add_double_words(x: DoubleWord, y: DoubleWord) -> DoubleWord:
    """AccurateDWPlusDW, relative error below 3 u^2 + 13 u^3.

    References:
      [Joldes, Muller, Popescu: Tight and rigorous error bounds for basic building
      blocks of double-word arithmetic, algorithm 6](https://doi.org/10.1145/3121432)
    """
    s, s_error = two_sum(x.hi, y.hi)
    t, t_error = two_sum(x.lo, y.lo)
    s, s_error = _fast_two_sum(s, s_error + t)
    return DoubleWord(*_fast_two_sum(s, s_error + t_error))


def _lift_to_double_word(x: jax.Array) -> DoubleWord:
    x = x.astype(jnp.float32)
    return DoubleWord(x, jnp.zeros_like(x))


def add_float(x: DoubleWord, y: jax.Array) -> DoubleWord:
    """DWPlusFP, relative error at most 2 u^2: algorithm 4 of the same."""
    s, s_error = two_sum(x.hi, y)
    return DoubleWord(*_fast_two_sum(s, x.lo + s_error))


# Compiled as one: a program has them once for every shape.
_add_double_words, _add_float = jax.jit(add_double_words), jax.jit(add_float)


def _add_block_of_double_words(terms: list[jax.Array]) -> DoubleWord:
    # One after another, eight terms have partial sums of 35 terms, at 2 u^2 each.
    # Counted are 24 terms, as in a balanced tree, at twice that.
    first, *others = (term.astype(jnp.float32) for term in terms)
    return functools.reduce(_add_float, others, _lift_to_double_word(first))


def _add_block_of_floats(dtype: Any, terms: list[jax.Array]) -> jax.Array:
    return _reduction.pairwise([term.astype(dtype) for term in terms], jnp.add)


def _of_floats(dtype: Any, unit_roundoff: float, slack: float) -> Accumulator:
    dtype = np.dtype(dtype)
    return Accumulator(
        name=dtype.name,
        dtype=dtype,
        lift=lambda x: x.astype(dtype),
        add=jnp.add,
        add_block=functools.partial(_add_block_of_floats, dtype),
        unit_roundoff=unit_roundoff,
        slack=slack,
    )


_ACCUMULATORS = {
    "float32": _of_floats(np.float32, UNIT_ROUNDOFF, 2.0**-7),
    "float32x2": Accumulator(
        name="float32x2",
        dtype=np.dtype(np.float32),
        lift=_lift_to_double_word,
        add=_add_double_words,
        add_block=_add_block_of_double_words,
        unit_roundoff=4 * UNIT_ROUNDOFF**2,
        slack=2.0**-19,
    ),
    "float64": _of_floats(np.float64, 2.0**-53, 2.0**-19),
}
