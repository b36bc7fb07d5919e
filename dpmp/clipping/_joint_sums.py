"""Metrics with noise: what a run may show of its losses and of its clipping.

Each is one more coordinate of the sum of gradients. With C the largest contribution of
an example to that sum, and its metrics a vector m of norm at most k,

    (clipped gradient, m)      has a norm of at most      sqrt(C^2 + k^2),

and one Gaussian mechanism releases both. For the same epsilon, the noise on the
gradient becomes wider by sqrt(1 + (k / C)^2), 0.5 % at k = C / 10. (Splitting the
budget, and running one mechanism for each, would come to the same.)

The number of examples whose gradient is not finite costs nothing. With a largest
contribution of C, an example adds either (clipped gradient, 0) or (0, C), a vector of
norm C at most, so that noise and epsilon are those of the gradient alone. Two examples
are at most sqrt(2) C apart, below the 2 C that replace-one is charged for. The count
comes out with a standard deviation of `noise_multiplier` examples.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpmp import _validate
from dpmp._numbers import as_real
from dpmp._typing import PyTree
from dpmp.clipping._clipped_sum import Outputs
from dpmp.numerics._grid import DEFAULT_RESOLUTION, Grid, GridArray

# Of the grid of a metric: fine for a mean, and no batch is too large for its sums.
_RESOLUTION = 2**10 - 1

_LARGEST_BATCH = (2**31 - 1) // _RESOLUTION


class JointSum(NamedTuple):
    """A sum of clipped gradients, and what gets noise together with it.

    Attributes:
      sum_of_clipped_grads: as on its own.
      num_overflows: of examples whose gradient is not finite, in units of the largest
        contribution to the sum; None if they are not counted.
      metrics: sums over examples, by name.
    """

    sum_of_clipped_grads: PyTree
    num_overflows: Any
    metrics: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ReleasedMetrics:
    """Which metrics to release at every step, and what they may cost.

    >>> metrics = ReleasedMetrics(largest_loss=8.0, fraction_clipped=True)
    >>> print(f"{metrics.widening:.2%} {metrics.stddev('loss', 1.0, 512):.3f}")
    0.50% 0.222

    Attributes:
      largest_loss: what losses are cut off at, for "loss", their mean; None not to
        release it. Losses below zero count as zero.
      fraction_clipped: whether to release "clipped", the fraction of examples whose
        gradient was scaled down.
      fraction_overflowed: whether to release "overflowed", the fraction of examples
        whose gradient was not finite. It is free.
      norm_share: the norm of an example's other metrics over that of its clipped
        gradient, k / C: the smaller, the more noise they have.
    """

    largest_loss: float | None = None
    fraction_clipped: bool = False
    fraction_overflowed: bool = False
    norm_share: float = 0.1

    def __post_init__(self):
        if self.largest_loss is not None:
            largest_loss = _validate.positive(
                largest_loss=self.largest_loss,
                fix="Use a public guess, such as the loss of random predictions.",
            )
            object.__setattr__(self, "largest_loss", largest_loss)
        norm_share = _validate.positive(
            norm_share=self.norm_share, fix="Use 0.1, for example."
        )
        object.__setattr__(self, "norm_share", norm_share)
        _validate.require(
            bool(self.names),
            "at least one metric must be released",
            released_metrics=self,
            fix="Choose one, or leave released_metrics out.",
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Of all metrics."""
        return self.paid + (("overflowed",) if self.fraction_overflowed else ())

    @property
    def paid(self) -> tuple[str, ...]:
        """Of the metrics that are coordinates of their own."""
        loss = () if self.largest_loss is None else ("loss",)
        return loss + (("clipped",) if self.fraction_clipped else ())

    @property
    def widening(self) -> float:
        """By what share the noise on the gradient becomes wider."""
        return math.hypot(1, self.norm_share) - 1 if self.paid else 0.0

    def joint_norm_bound(self, l2_norm_bound: float) -> float:
        """The largest contribution of an example to the sum and its metrics."""
        l2_norm_bound = as_real(l2_norm_bound)
        if not self.paid:
            return l2_norm_bound
        # Two roundings at most, and upwards.
        return math.hypot(1, self.norm_share) * l2_norm_bound * (1 + 2.0**-50)

    def stddev(
        self, name: str, noise_multiplier: float, expected_batch_size: float
    ) -> float:
        """Standard deviation of the noise of a metric, in its own unit."""
        noise_multiplier = as_real(noise_multiplier)
        expected_batch_size = as_real(expected_batch_size)
        if name == "overflowed":
            return noise_multiplier * (1 + self.widening) / expected_batch_size
        unit = self.largest_loss if name == "loss" and self.largest_loss else 1.0
        noise = noise_multiplier * math.hypot(1, self.norm_share) / self.norm_share
        return noise * math.sqrt(len(self.paid)) * unit / expected_batch_size

    def sums(
        self, values: jax.Array, is_clipped: jax.Array, l2_norm_bound: float
    ) -> dict[str, GridArray]:
        """The metrics that are coordinates of their own, summed over a batch.

        Args:
          values: the losses, (B,), zero for padding.
          is_clipped: (B,) bool, False for padding.
          l2_norm_bound: the largest contribution of an example to the sum of gradients.

        Raises:
          ValueError: for a batch of more than two million examples.
        """
        _validate.require(
            values.shape[0] <= _LARGEST_BATCH,
            f"batches with released metrics have at most {_LARGEST_BATCH} examples",
            fix="Leave released_metrics out.",
        )
        # As shares from 0 to 1. What is no number is no loss to be counted.
        loss = jnp.clip(values.astype(jnp.float32) / (self.largest_loss or 1.0), 0, 1)
        shares = {
            "loss": jnp.where(jnp.isnan(loss), 0, loss),
            "clipped": is_clipped.astype(jnp.float32),
        }
        largest = self.largest_of_one(l2_norm_bound)
        unit = Grid.from_bounds([largest], largest, _RESOLUTION).unit
        # In 64-bit mode, a sum of int32 would be int64.
        return {
            name: GridArray(
                jnp.sum(
                    jnp.round(shares[name] * _RESOLUTION).astype(jnp.int32),
                    dtype=jnp.int32,
                ),
                unit,
            )
            for name in self.paid
        }

    def largest_of_one(self, l2_norm_bound: float) -> float:
        """The largest contribution to one metric: their norm is below k together."""
        k = self.norm_share * contribution(as_real(l2_norm_bound))
        return k / math.sqrt(max(len(self.paid), 1)) * (1 - 2.0**-50)


def count_overflows(grad_norms: jax.Array, l2_norm_bound: float) -> GridArray:
    """One more coordinate for a sum: a contribution for each norm that is not finite.

    Args:
      grad_norms: (B,), zero for padding.
      l2_norm_bound: the largest contribution of an example.

    Returns:
      A sum on a grid of its own, of at most 65,535 examples.
    """
    bound = contribution(l2_norm_bound)
    unit = Grid.from_bounds([bound], bound, DEFAULT_RESOLUTION).unit
    count = jnp.sum(~jnp.isfinite(grad_norms), dtype=jnp.int32)
    return GridArray(jnp.minimum(count, 2**16 - 1) * DEFAULT_RESOLUTION, unit)


def in_examples(noisy_overflows: jax.Array, l2_norm_bound: float) -> jax.Array:
    """What `count_overflows` gave, with noise, as a number of examples."""
    return noisy_overflows / contribution(l2_norm_bound)


def contribution(l2_norm_bound: float) -> float:
    """What an example counts for; without clipping there is no noise either."""
    l2_norm_bound = as_real(l2_norm_bound)
    return l2_norm_bound if math.isfinite(l2_norm_bound) else 1.0


def join(
    total: PyTree,
    outputs: Outputs,
    l2_norm_bound: float,
    metrics: ReleasedMetrics | None,
    *,
    counts_overflows: bool,
) -> PyTree:
    """A sum of clipped gradients with what gets noise together with it.

    Args:
      total: the sum.
      outputs: sensitive, of the examples.
      l2_norm_bound: the largest contribution of an example to the sum.
      metrics: to be released.
      counts_overflows: whether the scale of the loss needs to know.

    Returns:
      The sum alone if there is nothing else, or a `JointSum`.
    """
    if metrics is None and not counts_overflows:
        return total
    sums = {}
    if metrics is not None:
        counts_overflows |= metrics.fraction_overflowed
        sums = metrics.sums(outputs.values, outputs.is_clipped, l2_norm_bound)
    count = None
    if counts_overflows:
        count = count_overflows(outputs.grad_norms, l2_norm_bound)
    return JointSum(total, count, sums)
