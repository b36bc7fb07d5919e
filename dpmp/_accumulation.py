"""Float sums in an order we control, with a bound on what their rounding costs.

Every sum here is a tree of elementwise additions, written out: a compiler keeps the
order of those, and chooses that of a reduction.
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
from dpmp._stored import StoredArray
from dpmp._typing import PyTree, SquaredNorm

UNIT_ROUNDOFF = 2.0**-24

# Terms added in one fused loop. More of them take longer to compile; a second level
# takes memory for what the first one leaves.
_FAN_IN = 32
_LARGEST_FAN_IN = 64

# Arrays of this many entries or fewer are joined before they are added up.
_FEW_ENTRIES = 512


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
      unit_roundoff: bound on the relative error of one `add`.
      slack: the share of the clip norm that is set aside for rounding. It is the same
        for all batches: if it depended on their size, one example more would rescale
        all others.
    """

    name: str
    dtype: Any
    lift: Callable[[jax.Array], PyTree]
    add: Callable[[PyTree, PyTree], PyTree]
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
    num_microbatches = math.ceil(batch_size / max(microbatch_size, 1))
    depth = fold_depth(microbatch_size)
    running_sums = microbatch_size * (num_microbatches * (num_microbatches + 1) / 2 - 1)
    error = batch_size * depth + max(running_sums, 0)
    longest_path = depth + num_microbatches
    u = accumulator.unit_roundoff
    return 2 * u * error * (1 + u) ** longest_path


def fence(tree: PyTree) -> PyTree:
    """Keeps the levels of a tree in loops of their own, where a compiler heeds it."""
    return jax.lax.optimization_barrier(tree)


def pairwise(terms: list[PyTree], add: Callable[[PyTree, PyTree], PyTree]) -> PyTree:
    """The sum of a non-empty list as a balanced tree of additions."""
    while len(terms) > 1:
        pairs = [add(a, b) for a, b in zip(terms[::2], terms[1::2], strict=False)]
        terms = pairs + terms[2 * len(pairs) :]
    return terms[0]


def fold(
    take: Callable[[int, int], PyTree],
    size: int,
    *,
    add: Callable[[PyTree, PyTree], PyTree],
    axis: int,
) -> PyTree:
    """Sums `size` slices along `axis` in a tree of depth `fold_depth(size)`.

    Args:
      take: `take(start, stop)` gives the terms of a range of slices; it is called
        once for every range, so that terms are computed where they are added.
      size: how many slices there are, at least 1.
      add: elementwise addition of two terms.
      axis: the axis along which the slices lie.

    Returns:
      The sum, with `axis` removed.
    """
    leftovers = []
    for fan_in, rows in _levels(size):
        leftovers += [take(i, i + 1) for i in range(fan_in * rows, size)]
        terms = [take(i * rows, (i + 1) * rows) for i in range(fan_in)]
        take, size = slicer(fence(pairwise(terms, add)), axis), rows
    total = pairwise([take(0, 1), *leftovers], add)
    return jax.tree.map(lambda x: jnp.squeeze(x, axis), total)


def fold_depth(size: int) -> int:
    """The largest number of additions on any path of `fold` over `size` slices."""
    depth, num_leftovers = 0, 0
    for fan_in, rows in _levels(size):
        depth += _log2_ceil(fan_in)
        num_leftovers += size - fan_in * rows
        size = rows
    return depth + _log2_ceil(1 + num_leftovers)


def _levels(size: int) -> list[tuple[int, int]]:
    """For each level of a fold: how many runs it adds, and the length of a run."""
    levels = []
    while size > 1:
        fan_in = size if size <= _LARGEST_FAN_IN else _FAN_IN
        size //= fan_in
        levels.append((fan_in, size))
    return levels


def _log2_ceil(n: int) -> int:
    return (n - 1).bit_length()


def slicer(tree: PyTree, axis: int) -> Callable[[int, int], PyTree]:
    """Gives ranges of `axis`, as `fold` takes them."""

    def take(start: int, stop: int) -> PyTree:
        return jax.tree.map(
            lambda x: jax.lax.slice_in_dim(x, start, stop, axis=axis), tree
        )

    return take


def squared_norm(stack: list[StoredArray]) -> SquaredNorm:
    """Per-example squared norms over at least one array."""
    value, depth = sum_entries(
        stack,
        lambda x, start, stop: jnp.square(x.load(start, stop, axis=1)),
        jnp.add,
    )
    # Squares of 16-bit floats are exact in float32, unless they are flushed to zero.
    rounded_square = any(x.dtype.itemsize > 2 for x in stack)
    return SquaredNorm(
        value, depth + rounded_square, sum(x.bits.shape[1] for x in stack)
    )


def sum_entries(
    stack: list[StoredArray],
    term: Callable[[StoredArray, int, int], jax.Array],
    add: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[jax.Array, int]:
    """Sums a function of the entries of at least one array, for each example.

    Args:
      stack: arrays of (B, n).
      term: `term(x, start, stop)` gives the terms of a range of columns.
      add: elementwise addition.

    Returns:
      The sums, (B,), and the largest number of additions on any path.
    """
    sums, depths = zip(*(_partial_sums(x, term, add) for x in stack), strict=True)
    parts = [part for parts in sums for part in parts]
    dtype = max((part.dtype for part in parts), key=lambda dtype: dtype.itemsize)
    joined = fence(jnp.concatenate([part.astype(dtype) for part in parts], axis=1))
    size = joined.shape[1]
    if size == 0:
        return jnp.zeros(joined.shape[:1], dtype), 0
    total = fold(slicer(joined, 1), size, add=add, axis=1)
    return total, max(depths) + fold_depth(size)


def _partial_sums(
    x: StoredArray,
    term: Callable[[StoredArray, int, int], jax.Array],
    add: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[list[jax.Array], int]:
    """Terms, added up until few are left: (B, k) arrays; and the additions made."""
    take: Callable[[int, int], jax.Array] = functools.partial(term, x)
    parts, depth, size = [], 0, x.bits.shape[1]
    while size > _FEW_ENTRIES:
        rows, rest = divmod(size, _FAN_IN)
        parts += [take(size - rest, size)] if rest else []
        terms = [take(i * rows, (i + 1) * rows) for i in range(_FAN_IN)]
        take, size = slicer(fence(pairwise(terms, add)), 1), rows
        depth += _log2_ceil(_FAN_IN)
    return [*parts, take(0, size)], depth


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


_ACCUMULATORS = {
    "float32": Accumulator(
        "float32",
        np.dtype(np.float32),
        lambda x: x.astype(jnp.float32),
        jnp.add,
        UNIT_ROUNDOFF,
        2.0**-7,
    ),
    "float32x2": Accumulator(
        "float32x2",
        np.dtype(np.float32),
        _lift_to_double_word,
        add_double_words,
        4 * UNIT_ROUNDOFF**2,
        2.0**-19,
    ),
    "float64": Accumulator(
        "float64",
        np.dtype(np.float64),
        lambda x: x.astype(jnp.float64),
        jnp.add,
        2.0**-53,
        2.0**-19,
    ),
}
