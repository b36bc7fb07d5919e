"""How a mechanism clips: what every clipped sum of it has in common."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dpmp._typing import PyTree
from dpmp.clipping._adaptive import AdaptiveClipNorm, with_clip_norm
from dpmp.clipping._clip_norms import ClipNorms
from dpmp.clipping._joint_sums import ReleasedMetrics
from dpmp.mechanism._released import Released, split, times


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """Clips and takes the noisy sums apart; `DPSGD` documents the attributes."""

    l2_clip_norm: PyTree
    rescale_to_unit_norm: bool
    expected_batch_size: float
    released_metrics: ReleasedMetrics | None

    @property
    def adaptive(self) -> AdaptiveClipNorm | None:
        """The clip norm if it adapts, or else None."""
        adapts = isinstance(self.l2_clip_norm, AdaptiveClipNorm)
        return self.l2_clip_norm if adapts else None

    @property
    def initial(self) -> jax.Array | None:
        """The clip norm of the first step if it adapts, or else None."""
        adaptive = self.adaptive
        return None if adaptive is None else jnp.float32(adaptive.initial)

    @property
    def is_in_clip_norms(self) -> bool:
        """Whether the sum and its noise are in units of the clip norm."""
        return self.rescale_to_unit_norm or self.adaptive is not None

    @property
    def l2_norm_bound(self) -> float:
        """The largest norm of a contribution to the averaged gradient."""
        given = self.adaptive.initial if self.adaptive else self.l2_clip_norm
        return ClipNorms.from_tree(
            given, self.is_in_clip_norms, self.expected_batch_size
        ).l2_norm_bound

    @property
    def is_finite(self) -> bool:
        """Whether the norm of a contribution has a bound."""
        return math.isfinite(self.l2_norm_bound)

    def arguments(self, clip_norm: Any) -> dict[str, Any]:
        """Arguments of `clipped_grad`; `clip_norm` is that of a step, if it adapts."""
        return {
            "l2_clip_norm": with_clip_norm(self.l2_clip_norm, clip_norm),
            "rescale_to_unit_norm": self.is_in_clip_norms,
            "normalize_by": self.expected_batch_size,
            "released_metrics": self.released_metrics,
        }

    def split(self, noisy: PyTree, clip_norm: Any) -> Released:
        """Splits a noisy sum; `clip_norm` is that of the step, if it adapts."""
        with_clip_norm(self.l2_clip_norm, clip_norm)
        released = split(
            noisy,
            self.l2_norm_bound,
            self.expected_batch_size,
            self.released_metrics,
            adaptive=self.adaptive,
            clip_norm=clip_norm,
        )
        is_as_asked = self.is_in_clip_norms == self.rescale_to_unit_norm
        return released if is_as_asked else times(released, clip_norm)
