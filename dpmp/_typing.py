"""Types shared by all layers, and the seam between gradient engines and clipping."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax

PyTree: TypeAlias = Any


_SMALLEST_NORMAL = 2.0**-126


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


class PerExampleGrads(Protocol):
    """What clipping needs to know about the gradients of one (micro)batch.

    Clipping sees squared norms and a weighted sum, never the gradients; how an
    engine represents them (a stack, or activations and cotangents) is its own
    business. `prefix` is the tree structure of the clip norms: one group of
    parameters for each of its leaves.
    """

    @property
    def values(self) -> Any:
        """Per-example losses, (B,)."""
        ...

    @property
    def aux(self) -> PyTree:
        """Per-example auxiliary outputs, leaves (B, ...)."""
        ...

    def squared_norms(self, prefix: Any) -> list[SquaredNorm]:
        """One `SquaredNorm` for each leaf of `prefix`."""
        ...

    def weighted_sum(
        self,
        clip_coefs: list[jax.Array],
        keep: jax.Array,
        prefix: Any,
        accumulator: Any,
    ) -> PyTree:
        """The sum over examples of coefficient times gradient.

        Args:
          clip_coefs: for each leaf of `prefix` the (B,) coefficients.
          keep: (B,) bool; an example that is not kept contributes exactly zero,
            by selection, whatever its gradient holds.
          prefix: tree structure of the clip norms.
          accumulator: the arithmetic of the sum, see `dpmp._accumulation`.

        Returns:
          The sum, in the accumulator's representation.
        """
        ...


GradEngine: TypeAlias = Callable[..., PerExampleGrads]
