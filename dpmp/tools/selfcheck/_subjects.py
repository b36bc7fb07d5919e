"""The subjects of a self-check, sums, noise and keys, and the results about them."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpmp.numerics import is_grid

NOISE_MULTIPLIER = 1.0

# The number of noisy sums that are drawn in one step.
_STEP_SIZE = 2**18

Number = Fraction | float

# Arrays of (k, n) float64, one for each leaf. In exact arithmetic, the entries of a
# leaf are the sums of its k rows.
Rows = list[np.ndarray]

# From leaves, (B, ...), and which examples are padding, (B,), to the sum.
SumFn = Callable[[list[np.ndarray], np.ndarray], Rows]


class BatchShape(NamedTuple):
    """The shape of batches for which sums are compared."""

    dtype: Any
    size: int
    microbatch_size: int | None = None

    def __str__(self) -> str:
        batch = f"{self.size} in {np.dtype(self.dtype).name}"
        return f"{batch} by {self.microbatch_size}" if self.microbatch_size else batch


# A subject has the name of its library and mode, and dpmp may claim that it passes.


class Sums(NamedTuple):
    """A way to clip gradients and to sum them.

    `make` maps a clip norm and a microbatch size to the sum function, and to the
    largest norm of a contribution and change of the sum, in units of the output. The
    subject accepts no clip norm below `smallest_clip_norm`. If it
    `assumes_fixed_slots`, it promises nothing about batches whose examples move.
    A gradient that is clipped keeps at least `smallest_norm` of the clip norm.
    """

    name: str
    is_claimed: bool
    make: Callable[[float, int | None], tuple[SumFn, Fraction]]
    batches: tuple[BatchShape, ...]
    smallest_clip_norm: float = 0.0
    assumes_fixed_slots: bool = False
    smallest_norm: float = 0.98


class Releases(NamedTuple):
    """A way to add noise, with a noise multiplier of `NOISE_MULTIPLIER`.

    `draw(has_example, num)` gives `num` noisy sums of one entry each, (num,). The batch
    has one example, which is clipped to 1, or none.
    """

    name: str
    is_claimed: bool
    draw: Callable[[bool, int], np.ndarray]


class Keys(NamedTuple):
    """A way to obtain the key of the noise.

    `draw` gives the uint32 words of a new key, and `noise` maps these words to noise.
    """

    name: str
    is_claimed: bool
    draw: Callable[[], np.ndarray]
    noise: Callable[[np.ndarray], np.ndarray]


class Subjects(NamedTuple):
    """All subjects, and remarks on missing measurements."""

    sums: tuple[Sums, ...] = ()
    releases: tuple[Releases, ...] = ()
    keys: tuple[Keys, ...] = ()
    remarks: tuple[str, ...] = ()


class Result(NamedTuple):
    """A measured value and its limits, if there are any."""

    measurement: str  # the name of the measured quantity
    subject: str  # the library and the mode that were measured
    is_claimed: bool  # whether dpmp promises that the value is within the limits
    value: float  # rounded to float64
    at_least: float | None
    at_most: float | None
    passed: bool  # whether the exact value is within the limits
    worst_case: str  # the data on which the value was measured


class Sizes(NamedTuple):
    """The sizes of the measurements."""

    num_entries: int = 20_000  # of a gradient with one leaf
    num_leaves: int = 128  # of a gradient with many
    largest_batch: int = 4096  # for which sums are compared
    num_training: int = 2**23  # noisy values of each sum that an attacker knows
    num_test: int = 2**20  # noisy values of each sum that the attacker tells apart


def compare(
    measurement: str,
    subject: Any,
    value: Number,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    worst_case: str = "",
    is_squared: bool = False,
) -> Result:
    """Compares a value, or the root of a square, to its limits, exactly.

    NaN is within no limits.
    """
    value = value if isinstance(value, Fraction) else float(value)
    power = 2 if is_squared else 1
    is_large = at_least is None or value >= Fraction(at_least) ** power
    is_small = at_most is None or value <= Fraction(at_most) ** power
    value = math.sqrt(value) if is_squared else float(value)
    claim = measurement, subject.name, subject.is_claimed
    passed = is_large and is_small
    return Result(*claim, value, at_least, at_most, passed, worst_case)


def sum_fn(fn: Callable[..., Any]) -> SumFn:
    """Turns a clipped sum of jax arrays into a function for `Sums`."""
    compiled = jax.jit(lambda batch, mask: fn(batch, is_padding_example=mask))

    def summed(batch: list[np.ndarray], is_padding: np.ndarray) -> Rows:
        leaves = jax.tree.leaves(compiled(batch, is_padding), is_leaf=is_grid)
        # Integers count units of their grid.
        arrays = [np.asarray(x.counts if is_grid(x) else x) for x in leaves]
        return [x.astype(np.float64).reshape(1, -1) for x in arrays]

    return summed


def draw_fn(
    fn: Callable[..., Any],
    privatizer: Any,
    dtype: Any = jnp.float32,
    coefficients: Sequence[float] = (1.0,),
) -> Callable[[bool, int], np.ndarray]:
    """Turns a clipped sum and an optax privatizer into a function for `Releases`.

    An attacker who knows everything about earlier steps takes their share out of the
    noise of a step, by the `coefficients` of a strategy.
    """
    update = jax.jit(privatizer.update)

    def draw(has_example: bool, num: int) -> np.ndarray:
        is_padding = np.array([not has_example])
        total = fn(np.full((1, 1), 10, dtype), is_padding_example=is_padding)
        sums = jax.tree.map(lambda x: jnp.broadcast_to(x, _STEP_SIZE), total)
        state, found = privatizer.init(sums), []
        earlier: list[np.ndarray] = []  # the noise of earlier steps, in grid units
        while len(found) < -(-num // _STEP_SIZE):
            released, state = update(sums, state)
            if tail := coefficients[1:]:
                counts = np.rint(np.float64(released) / sums.unit)
                if len(earlier) == len(tail):
                    share = sum(c * x for c, x in zip(tail, earlier, strict=True))
                    found.append(sums.unit * (counts + share))
                earlier = [counts - np.asarray(sums.counts), *earlier][: len(tail)]
            else:
                found.append(np.asarray(released))
        return np.concatenate(found)[:num]

    return draw
