"""What a self-check examines: sums, noise and keys, all behind callables."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpmp.numerics._grid import GridArray
from dpmp.numerics._sums import is_sum

NOISE_MULTIPLIER = 1.0

# Releases that are drawn in one step.
_STEP_SIZE = 2**18

# Arrays of (k, n) float64, one for each leaf. In exact arithmetic, the entries of a
# leaf are the sums of its k rows.
Rows = list[np.ndarray]

# From leaves, (B, ...), and which examples are padding, (B,), to the sum.
SumFn = Callable[[list[np.ndarray], np.ndarray], Rows]


class BatchShape(NamedTuple):
    """Batches for which sums are compared."""

    dtype: Any
    size: int
    microbatch_size: int | None = None

    def __str__(self) -> str:
        batch = f"{self.size} in {np.dtype(self.dtype).name}"
        return f"{batch} by {self.microbatch_size}" if self.microbatch_size else batch


@dataclass(frozen=True)
class Sums:
    """A way to clip gradients and to sum them.

    Attributes:
      name: of library and mode.
      is_claimed: whether dpmp promises that it passes.
      make: gives, for a clip norm and a microbatch size, a function of batches, and in
        units of its output the largest norm of a contribution and change of the sum.
      batches: to compare sums for.
      smallest_clip_norm: that can be used.
    """

    name: str
    is_claimed: bool
    make: Callable[[float, int | None], tuple[SumFn, Fraction]]
    batches: tuple[BatchShape, ...]
    smallest_clip_norm: float = 0.0


@dataclass(frozen=True)
class Releases:
    """A way to add noise, with a noise multiplier of `NOISE_MULTIPLIER`.

    Attributes:
      name: of library and mode.
      is_claimed: whether dpmp promises that it passes.
      draw: `draw(has_example, num)` gives `num` noisy sums of one entry each, (num,),
        for batches of one example that is clipped to 1, or of none.
    """

    name: str
    is_claimed: bool
    draw: Callable[[bool, int], np.ndarray]


@dataclass(frozen=True)
class Keys:
    """A way to come by the key of the noise.

    Attributes:
      name: of the library.
      is_claimed: whether dpmp promises that it passes.
      draw: gives the uint32 words of a new key.
      noise: some noise, as a function of these words.
    """

    name: str
    is_claimed: bool
    draw: Callable[[], np.ndarray]
    noise: Callable[[np.ndarray], np.ndarray]


class Subjects(NamedTuple):
    """All that is examined, and remarks on what is not."""

    sums: tuple[Sums, ...] = ()
    releases: tuple[Releases, ...] = ()
    keys: tuple[Keys, ...] = ()
    remarks: tuple[str, ...] = ()


def sum_fn(fn: Callable[..., Any]) -> SumFn:
    """A clipped sum of jax arrays, as `Sums` has them."""
    compiled = jax.jit(lambda batch, mask: fn(batch, is_padding_example=mask))

    def summed(batch: list[np.ndarray], is_padding: np.ndarray) -> Rows:
        total = compiled(batch, is_padding)
        return [_rows(x) for x in jax.tree.leaves(total, is_leaf=is_sum)]

    return summed


def _rows(x: Any) -> np.ndarray:
    """(k, n); integers count units of their grid."""
    parts = [x.steps] if isinstance(x, GridArray) else list(x) if is_sum(x) else [x]
    return np.stack([np.asarray(part).astype(np.float64).ravel() for part in parts])


def draw_fn(
    fn: Callable[..., Any], privatizer: Any, dtype: Any = jnp.float32
) -> Callable[[bool, int], np.ndarray]:
    """A clipped sum and an optax privatizer, as `Releases` has them."""
    update = jax.jit(privatizer.update)

    def draw(has_example: bool, num: int) -> np.ndarray:
        total = fn(
            np.full((1, 1), 10, dtype), is_padding_example=np.array([not has_example])
        )
        sums = jax.tree.map(lambda x: jnp.broadcast_to(x, _STEP_SIZE), total)
        state, noisy = privatizer.init(sums), []
        for _ in range(-(-num // _STEP_SIZE)):
            released, state = update(sums, state)
            noisy.append(np.asarray(released))
        return np.concatenate(noisy)[:num]

    return draw
