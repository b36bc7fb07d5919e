"""Float sums with bounds on their rounding errors.

The order of the additions determines how much rounding can change a sum.
`numerics/reduction.py` fixes that order, and docs/proofs.md has the proof.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import _meshes, _validate
from dpmp.numerics import reduction
from dpmp.numerics._interface import GradientSums, PartialSums
from dpmp.numerics.reduction import UNIT_ROUNDOFF

# Float sums in book-keeping. Whoever chooses them by name sees that they have no proof.
UNPROVED = "unproved_float32"


@dataclass(frozen=True)
class FloatSums(GradientSums, PartialSums):
    """The arithmetic of float sums."""

    name: str
    dtype: Any  # of the sum
    unit_roundoff: float  # an upper bound on the relative error of one addition
    # The same for all batches: otherwise one more example would rescale all others.
    rounding_reserve: float
    # The reserve covers the sums of gradients that are materialized. For others, no
    # count covers the roundings within a microbatch.
    is_proved: bool = True

    assumption = "Floating-point arithmetic rounds to nearest."

    @property
    def bytes_per_entry(self) -> int:
        return self.dtype.itemsize

    @property
    def method(self) -> str:
        return "per_example" if self.is_proved else "book_keeping"

    def check_mode(self) -> None:
        _validate.check_x64(self.dtype, "float64 sums")

    def check_not_mapped(self) -> None:
        _meshes.check_not_mapped(
            f"{self.name} sums",
            "their sensitivity does not cover what other devices add to them",
            fix='Use "exact" sums (with book-keeping "bounded"), whose integers psum '
            "adds without rounding. Or use jax.jit with sharded arrays.",
        )

    def check_batch(
        self, batch_size: int, microbatch_size: int, num_shards: int = 1
    ) -> None:
        needed = reserve_needed(self, batch_size, microbatch_size, num_shards)
        if not needed <= self.rounding_reserve:
            _validate.fail(
                f"rounding may cost a sum at most {self.rounding_reserve:.2g} of the "
                "clip norm, and it costs more in a batch of this size",
                microbatch_size=microbatch_size,
                arithmetic=self.name,
                fix='Use larger microbatches, arithmetic="exact", or "float64".',
            )

    def targets(
        self, targets: list[tuple[float, Any]], num_entries: list[int]
    ) -> list[tuple[float, Any]]:
        del num_entries
        return [(bound / (1 + self.rounding_reserve), cap) for bound, cap in targets]

    def contribution(
        self, row: jax.Array, coef: jax.Array, zero: jax.Array
    ) -> jax.Array:
        del zero
        return coef.astype(row.dtype) * row

    def from_float(self, total: jax.Array) -> jax.Array:
        return total.astype(self.dtype)

    def add_block(self, terms: list[jax.Array]) -> jax.Array:
        return super().add_block([self.from_float(x) for x in terms])

    def add_over(self, total: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        # Each device adds up one part, and gathers all parts.
        flat = jnp.pad(total.ravel(), (0, -total.size % jax.lax.axis_size(axes)))
        part = self.add_and_cut(flat, axes, 0)
        gathered = jax.lax.all_gather(part, axes, tiled=True)
        return gathered[: total.size].reshape(total.shape)

    def add_and_cut(
        self, total: jax.Array, axes: tuple[str, ...], axis: int
    ) -> jax.Array:
        # A tree of additions, written out, fixes the order.
        parts = jax.lax.all_to_all(total[None], axes, axis + 1, 0, tiled=True)
        while len(parts) > 1:
            half = len(parts) // 2
            joined = parts[:half] + parts[half : 2 * half]
            parts = jnp.concatenate([joined, parts[2 * half :]])
        return parts[0]

    def describe(self, resolution: int | None, microbatch_size: int | None) -> str:
        del resolution, microbatch_size
        claim = "so that the sensitivity holds for the computed floats."
        if not self.is_proved:
            claim = (
                "as far as microbatches are added up. Within a microbatch, most "
                "per-example gradients are never materialized, and the sensitivity of "
                "sums holds up to ordinary rounding, which is NOT PROVED; "
                "arithmetic='bounded' is."
            )
        return (
            f"norms in float32 or wider; sums in {self.name}. The clip norm is lowered "
            f"by what rounding can add ({self.rounding_reserve:.2g} of it for the "
            f"sum), {claim} Sums are put on a grid, and the noise is wider by what "
            "that costs."
        )


def reserve_needed(
    sums: FloatSums, batch_size: int, microbatch_size: int, num_shards: int = 1
) -> float:
    """The most that rounding moves sums of neighbours apart, in largest contributions.

    Each shard adds up its part of every microbatch. Then trees of additions add up the
    sums of the shards: one tree, or one over some axes of the mesh and one over others.
    """
    size = max(microbatch_size // num_shards, 1)
    num_microbatches = math.ceil(batch_size / (size * num_shards))
    running_sums = size * (num_microbatches * (num_microbatches + 1) / 2 - 1)
    error = num_microbatches * reduction.summed_norms(size) + max(running_sums, 0)
    # The depths of two trees, each rounded up, exceed the logarithm by less than two.
    depth_of_shards = int(math.log2(num_shards)) + 2 if num_shards > 1 else 0
    error = num_shards * error + depth_of_shards * batch_size
    longest_path = reduction.depth(size) + num_microbatches + depth_of_shards
    u = sums.unit_roundoff
    return 2 * u * error * (1 + u) ** longest_path


_FLOAT32 = FloatSums("float32", np.dtype(np.float32), UNIT_ROUNDOFF, 2.0**-7)
FLOAT_SUMS = [
    _FLOAT32,
    FloatSums("float64", np.dtype(np.float64), 2.0**-53, 2.0**-19),
    dataclasses.replace(_FLOAT32, name=UNPROVED, is_proved=False),
]
