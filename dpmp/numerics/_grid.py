"""Grids: integer multiples of one unit, in which clip norms are integers too."""

import abc
import dataclasses
import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NoReturn, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import _validate
from dpmp._arrays import as_device_dtypes
from dpmp._fence import at_least_float32
from dpmp._typing import PyTree
from dpmp._validate import as_real
from dpmp._warnings import warn
from dpmp.numerics._interface import Arithmetic

# Squares of integers up to this one fit into 32 bits, and so does the sum of two.
DEFAULT_RESOLUTION = 2**15 - 1

# Integers up to this one are exact in float32, and fit into int32 with eight more bits.
LARGEST_RESOLUTION = 2**22

# The largest share of a clip norm that rounding may take.
LARGEST_ROUNDING_SHARE = 0.05


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["counts"], meta_fields=["unit"]
)
@dataclasses.dataclass(frozen=True)
class GridArray:
    """An array of multiples of one number: `counts * unit`.

    It is the type of each leaf that `clipped_grad` returns with "exact" or "bounded"
    arithmetic. Such arrays may be added (`jax.lax.psum`). All other operations must
    wait until noise is added: noise comes before any division and any rounding. The
    operators of Python are refused, and `dpmp.noise_addition` takes int32 counts alone.

    Attributes:
      counts: the multiples, int32, modulo 2^32.
      unit: the unit of the grid, a float32 number.
    """

    counts: jax.Array
    unit: float

    def __post_init__(self):
        object.__setattr__(self, "unit", as_real(self.unit))

    def __repr__(self) -> str:
        kind = getattr(self.counts, "dtype", type(self.counts).__name__)
        shape = [*getattr(self.counts, "shape", ())]
        return f"GridArray({kind}{shape}, unit={self.unit!r})"  # counts are sensitive

    def to_float(self) -> jax.Array:
        """Returns the numbers in float32, with at most two roundings."""
        return self.counts.astype(jnp.float32) * np.float32(self.unit)

    def _refuse(self, *_: Any) -> NoReturn:
        _validate.fail(
            "a sum of clipped gradients must receive noise before it is computed "
            "with. Pass the sum to the privatizer, and what that returns to the "
            "optimizer: noisy_grads, noise_state = privatizer.update(sums, "
            "noise_state). Without privacy, `to_float()` has the numbers.",
            type=type(self).__name__,
            error=TypeError,
        )

    # An optimizer that receives the sum without noise calls one of these.
    __add__ = __radd__ = __sub__ = __rsub__ = __neg__ = __pow__ = _refuse
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse


# A leaf of a sum of clipped gradients is a GridArray, or an array of floats.
Sum: TypeAlias = GridArray | jax.Array


def is_grid(x: Any) -> bool:
    """Whether `x` is a `GridArray`; the `is_leaf` argument for trees of sums."""
    return isinstance(x, GridArray)


def to_float(leaf: Sum) -> jax.Array:
    """Returns a sum as one array of floats, float32 or wider."""
    if isinstance(leaf, GridArray):
        return leaf.to_float()
    x = jnp.asarray(leaf)
    return x.astype(at_least_float32(x.dtype))


def num_entries(sum_of_clipped_grads: PyTree) -> int:
    """Counts the entries of a sum."""
    return sum(math.prod(np.shape(x)) for x in jax.tree.leaves(sum_of_clipped_grads))


def flatten_before_noise(sum_of_clipped_grads: PyTree) -> tuple[list[Sum], Any]:
    """The leaves and the structure of a sum; ValueError unless all are valid."""
    leaves, treedef = jax.tree.flatten(sum_of_clipped_grads, is_leaf=is_grid)
    leaves = [x if is_grid(x) else as_device_dtypes(x) for x in leaves]
    for i, leaf in enumerate(leaves):
        _check_before_noise(leaf, i)
    return leaves, treedef


def _check_before_noise(leaf: Sum, number: int) -> None:
    if isinstance(leaf, GridArray):
        # Integer noise does not hide the fractional part of a number.
        if leaf.counts.dtype != jnp.dtype("int32"):
            _validate.fail(
                "the counts of an exact sum must stay int32 until noise is added",
                leaf=number,
                dtype=leaf.counts.dtype.name,
                fix="Add parts with psum (not pmean), divide with normalize_by, and do "
                "everything else after the noise.",
            )
        return
    dtype = jnp.result_type(leaf)
    if not jnp.issubdtype(dtype, jnp.floating):
        _validate.fail(
            "every leaf of sum_of_clipped_grads must be a real float array",
            leaf=number,
            dtype=dtype.name,
            fix="Add noise to the output of clipped_grad, before any other operation.",
        )
    if dtype.itemsize < 4:
        _validate.fail(
            "sums must have at least 32 bits until noise is added: the sensitivity "
            "does not cover the rounding of a cast. Cast what the privatizer returns.",
            leaf=number,
            dtype=dtype.name,
        )


def round_to_grid(leaf: Sum, unit: float) -> GridArray:
    """Rounds a float sum to multiples of a power of two; a `GridArray` is unchanged."""
    if isinstance(leaf, GridArray):
        return leaf
    scaled, limit = to_float(leaf) * (1 / unit), 2**31 - 2**27
    counts = jnp.clip(jnp.round(scaled), -limit, limit).astype(jnp.int32)
    return GridArray(jnp.clip(counts, -limit, limit), unit)  # clips integers from NaN


@dataclasses.dataclass(frozen=True)
class GridSums(Arithmetic):
    """The part of an `Arithmetic` that all sums on a grid share."""

    resolution: int  # the size of the largest contribution, in units of the grid
    # The largest norm of each clipping group, in units, and the unit of the grid; not
    # set until the clip norms are known.
    max_norms: tuple[int, ...] = ()
    unit: float = 0.0

    largest_resolution = LARGEST_RESOLUTION
    bytes_per_entry = 4
    rounding_reserve = 0.0

    @abc.abstractmethod
    def max_norm_before_rounding(self, max_norm: int, size: int) -> float:
        """The largest norm, in units, of `size` entries before they are rounded."""

    def with_resolution(self, resolution: int | None) -> Self:
        return dataclasses.replace(self, resolution=resolution)

    def for_clip_norms(self, bounds: Sequence[float], l2_norm_bound: float) -> Self:
        """Makes a grid whose integer max_norms never exceed the true norms."""
        resolution = _validate.integer_in(
            range(1, self.largest_resolution + 1),
            f"resolution must be an integer from 1 to {self.largest_resolution}. "
            f"Leave it out for {DEFAULT_RESOLUTION}.",
            resolution=self.resolution,
        )
        if not math.isfinite(l2_norm_bound):
            _validate.fail(
                '"exact" and "bounded" sums need a finite clip norm, and '
                'nan_safe=True. Use arithmetic="float32" if nothing is to be private '
                '(with book-keeping "unproved_float32"; in DPSGD: without_privacy()).',
                l2_norm_bound=l2_norm_bound,
            )
        squares = [Fraction(bound) ** 2 for bound in bounds]
        total = max(sum(squares), Fraction(l2_norm_bound) ** 2)
        scale = Fraction(resolution**2) / (total or 1)
        max_norms = tuple(math.isqrt(int(square * scale)) for square in squares)
        unit = unit_of(l2_norm_bound, resolution)
        return dataclasses.replace(
            self, resolution=resolution, max_norms=max_norms, unit=unit
        )

    def targets(
        self, targets: list[tuple[float, Any]], num_entries: list[int]
    ) -> list[tuple[float, Any]]:
        scaled = []
        for (bound, cap), max_norm, size in zip(
            targets, self.max_norms, num_entries, strict=True
        ):
            left = self.max_norm_before_rounding(max_norm, size)
            if not (left >= (1 - LARGEST_ROUNDING_SHARE) * max_norm > 0 or bound == 0):
                _validate.fail(
                    f"the resolution must be fine enough to round {size} entries at a "
                    f"cost of at most {LARGEST_ROUNDING_SHARE:.0%} of the clip norm. "
                    f"Use a higher one, up to {self.largest_resolution}, or "
                    'arithmetic="float32".',
                    resolution=self.resolution,
                )
            cap = cap / self.unit if self.unit else 0.0
            scaled.append((max(left, 0.0) / (1 + self.rounding_reserve), cap))
        return scaled

    def check_batch(
        self, batch_size: int, microbatch_size: int, num_shards: int = 1
    ) -> None:
        del microbatch_size, num_shards
        largest = (2**31 - 1) // self.resolution
        if batch_size > largest:
            warn(
                f"sums can exceed 32 bits if the clipped gradients of {largest} "
                "examples all point along one coordinate. That costs accuracy, not "
                "privacy, and gradients of a model with many entries hardly do so. A "
                f"batch of at most {largest} avoids it."
            )

    def add_over(self, total: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        return jax.lax.psum(total, axes)

    def add_and_cut(
        self, total: jax.Array, axes: tuple[str, ...], axis: int
    ) -> jax.Array:
        return jax.lax.psum_scatter(total, axes, scatter_dimension=axis, tiled=True)

    def finish(self, total: PyTree) -> PyTree:
        return jax.tree.map(lambda counts: GridArray(counts, self.unit), total)


def unit_of(l2_norm_bound: float, resolution: int) -> float:
    """The largest float32 unit of which `resolution` are at most `l2_norm_bound`."""
    unit = np.float32(l2_norm_bound / resolution)
    if float(unit) * resolution > l2_norm_bound:
        unit = np.nextafter(unit, np.float32(0))
    return float(unit)
