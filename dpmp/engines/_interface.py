"""The seam between gradient engines and clipping."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import jax

from dpmp._typing import PyTree
from dpmp.numerics._arithmetic import Arithmetic
from dpmp.numerics._squared_norms import SquaredNorm


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
        arithmetic: Arithmetic,
    ) -> PyTree:
        """The sum over examples of coefficient times gradient.

        Args:
          clip_coefs: for each leaf of `prefix` the (B,) coefficients.
          keep: (B,) bool; an example that is not kept contributes exactly zero,
            by selection, whatever its gradient holds.
          prefix: tree structure of the clip norms.
          arithmetic: of the sum.

        Returns:
          The sum, before `arithmetic.finish`.
        """
        ...


GradEngine: TypeAlias = Callable[..., PerExampleGrads]
