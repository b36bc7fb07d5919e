"""The arithmetic of a sum of clipped gradients, as one object.

    arithmetic = parse_arithmetic("exact", method="per_example")

The object alone knows how a sum is computed, and why its sensitivity holds. No other
module compares names of arithmetics, or asks for the type of the object.
"""

from collections.abc import Sequence
from typing import Any, Protocol, cast

import jax
import numpy as np

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.numerics._bounded import BoundedSums
from dpmp.numerics._exact import ExactSums
from dpmp.numerics._float_sums import FLOAT_SUMS, UNPROVED, FloatSums
from dpmp.numerics._stored import StoredArray


class Arithmetic(Protocol):
    """A way to add up clipped gradients; frozen and hashable.

    A contribution is the clipped gradient of one example as it enters the sum. A
    clipping group is the parameters that share one clip norm. Some arithmetics use a
    grid: they count in integer multiples of one number, the unit.
    """

    @property
    def name(self) -> str:
        """The name, as users spell it."""
        ...

    @property
    def method(self) -> str:
        """The name of the gradient engine that it is for."""
        ...

    @property
    def resolution(self) -> int | None:
        """The size of the largest contribution in units, or None without a grid.

        A grid needs a finite clip norm.
        """
        ...

    @property
    def bytes_per_entry(self) -> int:
        """The memory of the sum, in bytes for each entry."""
        ...

    @property
    def is_proved(self) -> bool:
        """Whether the sensitivity is proved for the computed bits."""
        ...

    @property
    def needs_norm_bounds(self) -> bool:
        """Whether an engine must compute upper bounds that include rounding errors.

        Such bounds need small microbatches, and assume that examples have fixed slots.
        """
        ...

    @property
    def assumption(self) -> str:
        """A sentence for the statement, on the assumptions about the device."""
        ...

    def check_mode(self) -> None:
        """Raises ValueError if jax would silently narrow the sum."""
        ...

    def check_not_mapped(self) -> None:
        """Raises ValueError under `jax.shard_map`, unless `psum` may add its sums."""
        ...

    def check_batch(
        self, batch_size: int, microbatch_size: int, num_shards: int = 1
    ) -> None:
        """Raises ValueError for a batch whose rounding is not covered.

        Both sizes are those of all shards together (`clipping/_shards.py`).
        """
        ...

    def with_resolution(self, resolution: int | None) -> "Arithmetic":
        """Returns this arithmetic on a grid of another resolution, if it has a grid."""
        ...

    def for_clip_norms(
        self, bounds: Sequence[float], l2_norm_bound: float
    ) -> "Arithmetic":
        """Returns this arithmetic for the largest norms of each group, and of all."""
        ...

    def targets(
        self, targets: list[tuple[float, Any]], num_entries: list[int]
    ) -> list[tuple[float, Any]]:
        """Lowers the norms to clip to, by a reserve for rounding.

        The targets are a norm and a largest coefficient for each group. On a grid, the
        results are in units.
        """
        ...

    def add(self, a: PyTree, b: PyTree, /) -> PyTree:
        """Adds two sums."""
        ...

    def add_over(self, total: PyTree, axes: tuple[str, ...], /) -> PyTree:
        """Adds the sums of the devices along mesh axes, inside of `shard_map`."""
        ...

    def add_and_cut(self, total: PyTree, axes: tuple[str, ...], axis: int, /) -> PyTree:
        """Like `add_over`, but a device receives only its own part along `axis`."""
        ...

    def finish(self, total: PyTree) -> PyTree:
        """Turns a tree of sums into the form that users receive."""
        ...

    def wanted_resolution(self, num_parameters: int) -> float | None:
        """Returns the resolution that a sum needs, or None without a grid."""
        ...

    def rounding_share(self, num_parameters: int, resolution: int) -> float:
        """Returns the share of the clip norm that rounding to a grid takes."""
        ...

    def describe(self, resolution: int | None, microbatch_size: int | None) -> str:
        """Describes for the statement, in full sentences, how sums are computed."""
        ...


class GradientSums(Arithmetic, Protocol):
    """An arithmetic of "per_example", the engine that materializes gradients."""

    def passes_norm_check(
        self, stack: list[StoredArray], coef: jax.Array, keep: jax.Array, group: int
    ) -> jax.Array:
        """Returns which examples of `keep` contribute to a clipping group, (B,) bool.

        The arrays of the group are (B, n), and the coefficients (B,).
        """
        ...

    def contribution(
        self, row: jax.Array, coef: jax.Array, zero: jax.Array
    ) -> jax.Array:
        """Returns the contribution of an example with gradient `row`, (n,).

        The compiler does not know that `zero`, an int32, is zero.
        """
        ...

    def add_block(self, terms: list[jax.Array], /) -> PyTree:
        """Adds up a few contributions."""
        ...


class PartialSums(Arithmetic, Protocol):
    """An arithmetic of "book_keeping", which sums each microbatch in floats."""

    def from_float(self, total: jax.Array, /) -> PyTree:
        """Turns the float sum of a microbatch into a sum of this arithmetic."""
        ...


ARITHMETICS = {x.name: x for x in (ExactSums(), BoundedSums(), *FLOAT_SUMS)}


def parse_arithmetic(
    arithmetic: str | Arithmetic | None,
    *,
    method: str = "per_example",
    dtype: Any = None,
) -> Arithmetic:
    """Makes the arithmetic of `clipped_grad`; see there for the arguments.

    Raises:
      ValueError: for an unknown name, for a dtype narrower than float32, for arguments
        that contradict each other, and for float64 without 64-bit mode.
    """
    dtype_name = None if dtype is None else _name_of(dtype)
    if arithmetic is None:
        default = "bounded" if method == "book_keeping" else "float32"
        arithmetic = dtype_name or default
    if isinstance(arithmetic, str):
        arithmetic = ARITHMETICS.get(arithmetic, arithmetic)
    _validate.require(
        isinstance(arithmetic, ExactSums | BoundedSums | FloatSums),
        f"arithmetic must be one of {list(ARITHMETICS)}",
        arithmetic=arithmetic,
        fix="Use one of these names.",
    )
    sums = cast("Arithmetic", arithmetic)
    _validate.require(
        method == sums.method,
        f'"{sums.name}" sums must be used with method="{sums.method}"',
        method=method,
        fix="Book-keeping does not materialize most per-example gradients. Use "
        '"bounded" sums there, which have a proof for that. Or use sums without a '
        f'proof: "{UNPROVED}". All others are for method="per_example".',
    )
    _validate.require(
        dtype is None
        or (isinstance(sums, FloatSums) and dtype_name == sums.dtype.name),
        "dtype must be that of float sums",
        arithmetic=sums.name,
        dtype=dtype,
        fix="Leave dtype out. (Rounding a wide sum before the noise would undo it.)",
    )
    sums.check_mode()
    return sums


def _name_of(dtype: Any) -> str:
    try:
        name = np.dtype(dtype).name
    except (TypeError, ValueError):
        name = dtype
    _validate.require(
        name in ("float32", "float64"),
        "dtype must be float32 or float64",
        dtype=name,
        fix="Leave dtype out: half-precision norms and sums break the clipping bound, "
        "and only the model's own arithmetic may be narrower.",
    )
    return name


def default_arithmetic(method: str) -> str:
    """The name of the default arithmetic of `DPSGD`."""
    return "bounded" if method == "book_keeping" else "exact"


def arithmetic_without_privacy(method: str) -> str:
    """The name of the arithmetic for training without clipping."""
    return UNPROVED if method == "book_keeping" else "float32"
