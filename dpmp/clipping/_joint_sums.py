"""Noisy metrics of the losses and the clipping of a run.

Each metric is one more coordinate of the sum of clipped gradients, and receives noise
together with it. Let C be the largest norm of a clipped gradient, and let the metrics
of one example be a vector m of norm at most k. Then (clipped gradient, m) has a norm of
at most sqrt(C^2 + k^2), and one Gaussian mechanism releases both. At the same epsilon,
the noise on the gradient is wider by a factor of sqrt(1 + (k / C)^2). (Two mechanisms
that share the privacy budget would cost the same.)

An overflow is an example whose gradient norm is not finite. The number of overflows
costs nothing: docs/proofs.md shows why. An adaptive clip norm is one more coordinate,
with its own share of the norm.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp._validate import as_real
from dpmp.clipping._adaptive import AdaptiveClipNorm
from dpmp.clipping._clip_norms import AutomaticClipping
from dpmp.clipping._clipped_sum import Outputs
from dpmp.numerics import DEFAULT_RESOLUTION, GridArray, unit_of

# The grid of a metric: fine enough for a mean, and coarse enough for large batches.
_RESOLUTION = 2**10 - 1

_LARGEST_BATCH = (2**31 - 1) // _RESOLUTION


class JointSum(NamedTuple):
    """A sum of clipped gradients, with the sums that receive noise together with it.

    Attributes:
      sum_of_clipped_grads: the sum of clipped gradients.
      num_overflows: the number of examples whose gradient norm is not finite, times the
        largest norm of a clipped gradient. None if these examples are not counted.
      metrics: the sum over examples of each metric, by name.
      within: the signed unclipped count. An example within the adaptive clip norm adds
        `AdaptiveClipNorm.max_coordinate`, and any other example subtracts it. None if
        the clip norm does not adapt.
    """

    sum_of_clipped_grads: PyTree
    num_overflows: Any
    metrics: dict[str, Any]
    within: Any = None


class Released(NamedTuple):
    """The noisy values that one step releases.

    Attributes:
      noisy_grads: the averaged clipped gradient, with noise.
      num_overflows: the noisy number of examples whose gradient norm is not finite;
        None if these are not counted.
      metrics: the noisy means over examples, by name.
      clip_norm: the clip norm of the next step, a float32; None unless it adapts.
    """

    noisy_grads: PyTree
    num_overflows: Any
    metrics: dict[str, jax.Array]
    clip_norm: jax.Array | None = None


@dataclass(frozen=True, kw_only=True)
class ReleasedMetrics:
    """Chooses metrics to release with noise at every step.

    A metric receives noise together with the gradient. The cost of "loss" and "clipped"
    is wider noise on the gradient: `noise_increase` is the relative increase.

    >>> metrics = ReleasedMetrics(largest_loss=8.0, fraction_clipped=True)
    >>> print(f"{metrics.noise_increase:.2%} {metrics.stddev('loss', 1.0, 512):.3f}")
    0.50% 0.222

    Attributes:
      largest_loss: releases "loss", the mean loss, with losses limited to the range
        from 0 to this value. None does not release it.
      fraction_clipped: whether to release "clipped", the fraction of examples whose
        gradient was scaled down.
      fraction_overflowed: whether to release "overflowed", the fraction of examples
        whose gradient norm was not finite. It costs nothing.
      norm_share: the largest norm of the metrics "loss" and "clipped" of one example,
        over the largest norm of a clipped gradient. A smaller share means more noise on
        these metrics and less on the gradient.
    """

    largest_loss: float | None = None
    fraction_clipped: bool = False
    fraction_overflowed: bool = False
    norm_share: float = 0.1

    def __post_init__(self):
        guess = "Use a public guess, such as the loss of random predictions."
        positive = functools.partial(_validate.positive, fix=guess)
        _validate.fields(
            self,
            largest_loss=_validate.optional(positive),
            norm_share=_validate.probability,
            fraction_clipped=_validate.boolean,
            fraction_overflowed=_validate.boolean,
        )
        if not self.names:
            _validate.fail(
                "at least one metric must be released. Choose one, or leave "
                "released_metrics out.",
                released_metrics=self,
            )

    @classmethod
    def with_overflows(cls, metrics: "ReleasedMetrics | None") -> "ReleasedMetrics":
        """Returns `metrics` with the fraction of overflows, which costs nothing."""
        if metrics is None:
            return cls(fraction_overflowed=True)
        return dataclasses.replace(metrics, fraction_overflowed=True)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the released metrics."""
        return self.paid + (("overflowed",) if self.fraction_overflowed else ())

    @property
    def paid(self) -> tuple[str, ...]:
        """The names of the metrics that make the noise on the gradient wider."""
        loss = () if self.largest_loss is None else ("loss",)
        return loss + (("clipped",) if self.fraction_clipped else ())

    @property
    def noise_increase(self) -> float:
        """The relative increase of the noise on the gradient; 0.005 means 0.5 %."""
        return math.hypot(1, self.norm_share) - 1 if self.paid else 0.0

    def joint_norm_bound(self, l2_norm_bound: float) -> float:
        """The largest norm of a contribution to the sum and the metrics together."""
        l2_norm_bound = as_real(l2_norm_bound)
        if not self.paid:
            return l2_norm_bound
        # The last factor covers the roundings of the others: it may only err upwards.
        return math.hypot(1, self.norm_share) * l2_norm_bound * (1 + 2.0**-50)

    def stddev(
        self, name: str, noise_multiplier: float, expected_batch_size: float
    ) -> float:
        """The standard deviation of the noise on a metric, in the metric's own unit.

        An adaptive clip norm makes it wider; `statement()` of a mechanism counts that.
        """
        _validate.one_of(self.names, name=name)
        noise_multiplier = as_real(noise_multiplier)
        expected_batch_size = as_real(expected_batch_size)
        if name == "overflowed":
            return noise_multiplier * (1 + self.noise_increase) / expected_batch_size
        unit = self.largest_loss if name == "loss" and self.largest_loss else 1.0
        noise = noise_multiplier * math.hypot(1, self.norm_share) / self.norm_share
        return noise * math.sqrt(len(self.paid)) * unit / expected_batch_size

    def sums(
        self, values: jax.Array, is_clipped: jax.Array, l2_norm_bound: float
    ) -> dict[str, GridArray]:
        """The sums over a batch of the metrics "loss" and "clipped", where released.

        `values` are the losses, (B,), and `is_clipped` is (B,) bool; both are zero for
        padding. `l2_norm_bound` is the largest norm of a clipped gradient. Raises
        ValueError for a batch of more than two million examples.
        """
        # Every metric is scaled to shares from 0 to 1. A loss of NaN counts as 0.
        loss = jnp.clip(values.astype(jnp.float32) / (self.largest_loss or 1.0), 0, 1)
        shares = {
            "loss": jnp.where(jnp.isnan(loss), 0, loss),
            "clipped": is_clipped.astype(jnp.float32),
        }
        largest = self.max_coordinate(l2_norm_bound)
        return {name: _sum_of_shares(shares[name], largest) for name in self.paid}

    def means(
        self, noisy: JointSum, l2_norm_bound: float, expected_batch_size: float
    ) -> dict[str, jax.Array]:
        """The noisy means over examples of all metrics.

        `l2_norm_bound` is that of the function which `clipped_grad` returned, and
        counts `normalize_by` in. The sums are divided by the expected batch size: the
        true size is sensitive.
        """
        largest = self.max_coordinate(l2_norm_bound)
        units = {
            "loss": (self.largest_loss or 1.0) / largest,
            "clipped": 1 / largest,
            "overflowed": 1 / contribution(l2_norm_bound),
        }
        sums = {**noisy.metrics, "overflowed": noisy.num_overflows}
        return {x: sums[x] * (units[x] / expected_batch_size) for x in self.names}

    def max_coordinate(self, l2_norm_bound: float) -> float:
        """The largest value of each metric of one example; k bounds their norm."""
        k = self.norm_share * contribution(l2_norm_bound)
        return k / math.sqrt(max(len(self.paid), 1)) * (1 - 2.0**-50)


def _sum_of_shares(shares: jax.Array, largest: float) -> GridArray:
    """Sums (B,) shares from -1 to 1, in units of `largest`."""
    if shares.shape[0] > _LARGEST_BATCH:  # the size of a batch is sensitive
        raise _validate.RefusedError(
            f"batches with released metrics or an adaptive clip norm must have at most "
            f"{_LARGEST_BATCH} examples. Leave released_metrics out, and use a fixed "
            f"clip norm."
        )
    counts = jnp.round(shares * _RESOLUTION).astype(jnp.int32)
    # Without this dtype, a sum of int32 would be int64 in 64-bit mode.
    total = jnp.sum(counts, dtype=jnp.int32)
    return GridArray(total, unit_of(largest, _RESOLUTION))


def contribution(l2_norm_bound: float) -> float:
    """The value of one overflow in the count: the bound, or 1 if it is infinite."""
    # The bound is infinite only without clipping, and then there is no noise either.
    l2_norm_bound = as_real(l2_norm_bound)
    return l2_norm_bound if math.isfinite(l2_norm_bound) else 1.0


def count_overflows(grad_norms: jax.Array, l2_norm_bound: float) -> GridArray:
    """Counts at most 65,535 overflows, in units of `contribution(l2_norm_bound)`."""
    unit = unit_of(contribution(l2_norm_bound), DEFAULT_RESOLUTION)
    count = jnp.sum(~jnp.isfinite(grad_norms), dtype=jnp.int32)
    return GridArray(jnp.minimum(count, 2**16 - 1) * DEFAULT_RESOLUTION, unit)


@dataclass(frozen=True)
class JointCoordinates:
    """Everything that receives noise together with a sum of clipped gradients."""

    metrics: ReleasedMetrics | None
    adaptive: AdaptiveClipNorm | None

    @classmethod
    def of(
        cls,
        metrics: Any,
        l2_clip_norm: Any,
        *,
        rescale_to_unit_norm: bool = True,
        nan_safe: bool = True,
    ) -> "JointCoordinates":
        """Checks and selects arguments of `clipped_grad`; raises ValueError."""
        if metrics is not None:
            fix = "Use dpmp.ReleasedMetrics(fraction_clipped=True), for example."
            _validate.instance(ReleasedMetrics, fix, released_metrics=metrics)
        adapts = isinstance(l2_clip_norm, AdaptiveClipNorm)
        if not nan_safe and (metrics or adapts):
            _validate.fail(
                "released_metrics and AdaptiveClipNorm must have nan_safe=True. Leave "
                "nan_safe out.",
                nan_safe=nan_safe,
            )
        if not rescale_to_unit_norm and adapts:
            _validate.fail(
                "an AdaptiveClipNorm needs a sensitivity that does not depend on it. "
                "Set rescale_to_unit_norm=True, and multiply by the clip norm after "
                "the noise is added.",
                rescale_to_unit_norm=rescale_to_unit_norm,
            )
        is_automatic = isinstance(l2_clip_norm, AutomaticClipping)
        if is_automatic and metrics and metrics.fraction_clipped:
            _validate.fail(
                "fraction_clipped needs a clip norm: automatic clipping scales all "
                "gradients. Leave fraction_clipped out.",
                l2_clip_norm=l2_clip_norm,
            )
        return cls(metrics, l2_clip_norm if adapts else None)

    def norm_bound(self, l2_norm_bound: float) -> float:
        """The largest norm of a contribution to the sum and all coordinates together.

        `l2_norm_bound` is the largest norm of a contribution to the sum alone.
        """
        bound = l2_norm_bound
        if self.metrics:
            bound = self.metrics.joint_norm_bound(l2_norm_bound)
        if self.adaptive:
            # The last factor covers the roundings: the bound may only err upwards.
            share = self.adaptive.norm_share * l2_norm_bound
            bound = math.hypot(bound, share) * (1 + 2.0**-50)
        return bound

    def join(self, total: PyTree, outputs: Outputs, l2_norm_bound: float) -> PyTree:
        """Returns a `JointSum` of `total` and the coordinates, or `total` without any.

        `outputs` are the per-example outputs of the same batch.
        """
        metrics, adaptive = self.metrics, self.adaptive
        if not (metrics or adaptive):
            return total
        sums, count, within = {}, None, None
        if metrics:
            sums = metrics.sums(outputs.values, outputs.is_clipped, l2_norm_bound)
            if metrics.fraction_overflowed:
                count = count_overflows(outputs.grad_norms, l2_norm_bound)
        if adaptive:
            signs = adaptive.signs(outputs.grad_norms, outputs.is_example)
            within = _sum_of_shares(signs, adaptive.max_coordinate(l2_norm_bound))
        return JointSum(total, count, sums, within)

    def split(
        self,
        noisy: PyTree,
        l2_norm_bound: float,
        expected_batch_size: float,
        clip_norm: Any = None,
    ) -> Released:
        """Splits a noisy output of `clipped_grad`, which may be a `JointSum`.

        `clip_norm` is the clip norm of the step, if it adapts.
        """
        if not isinstance(noisy, JointSum):
            return Released(noisy, None, {})
        count, means = noisy.num_overflows, {}
        if count is not None:
            count /= contribution(l2_norm_bound)
        if self.metrics:
            means = self.metrics.means(noisy, l2_norm_bound, expected_batch_size)
        if self.adaptive:
            fraction = self.adaptive.fraction(
                noisy.within, l2_norm_bound, expected_batch_size
            )
            clip_norm = self.adaptive.update(clip_norm, fraction)
        return Released(noisy.sum_of_clipped_grads, count, means, clip_norm)


def with_clip_norm(l2_clip_norm: PyTree, clip_norm: Any) -> PyTree:
    """Sets the clip norm of one step in an `AdaptiveClipNorm`; keeps any other."""
    adapts = isinstance(l2_clip_norm, AdaptiveClipNorm)
    if adapts != (clip_norm is not None):
        _validate.fail(
            "clip_norm must be given for an AdaptiveClipNorm, and for nothing else",
            l2_clip_norm=l2_clip_norm,
            clip_norm=None if clip_norm is None else type(clip_norm).__name__,
            fix="Begin with mechanism.initial_clip_norm, and go on with the clip_norm "
            "that mechanism.split(noisy, clip_norm=...) returns.",
        )
    return l2_clip_norm.at(clip_norm) if adapts else l2_clip_norm
