"""The interface between gradient engines and clipping."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import jax

from dpmp._typing import PyTree
from dpmp.numerics._arithmetic import Arithmetic
from dpmp.numerics._squared_norms import SquaredNorm


class PerExampleGrads(Protocol):
    """The gradients of one batch or microbatch, as clipping sees them.

    Clipping reads squared norms and a weighted sum; it never reads a gradient. Each
    engine is free in how it represents the gradients, for example as a stack, or as
    activations and cotangents.

    The argument `prefix` of the methods is the tree structure of the clip norms. Each
    of its leaves stands for one clipping group: the parameters that share one clip
    norm.
    """

    @property
    def values(self) -> jax.Array | None:
        """Per-example losses, (B,)."""
        ...

    @property
    def aux(self) -> PyTree:
        """Per-example auxiliary outputs, with leaves of shape (B, ...)."""
        ...

    def squared_norms(self, prefix: Any) -> list[SquaredNorm]:
        """Computes one `SquaredNorm` for each leaf of `prefix`."""
        ...

    def weighted_sum(
        self,
        clip_coefs: list[jax.Array],
        keep: jax.Array,
        prefix: Any,
        arithmetic: Arithmetic,
    ) -> PyTree:
        """Sums coefficient times gradient over the examples.

        Args:
          clip_coefs: the (B,) coefficients for each leaf of `prefix`.
          keep: (B,) bool. An example whose entry is False contributes exactly zero, by
            selection, even if its gradient is infinite or NaN.
          prefix: the tree structure of the clip norms.
          arithmetic: the arithmetic of the sum.

        Returns:
          The sum, before `arithmetic.finish`.
        """
        ...


GradEngine: TypeAlias = Callable[..., PerExampleGrads]
