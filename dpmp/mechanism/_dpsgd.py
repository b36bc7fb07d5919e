"""One private training run: its sampling, clipping, arithmetic and noise."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, cast

import dp_accounting
import jax
import optax

from dpmp import _validate, accounting, batch_selection, clipping, noise_addition
from dpmp._typing import PyTree
from dpmp.clipping._joint_sums import ReleasedMetrics, contribution
from dpmp.engines._methods import check_method
from dpmp.mechanism import _checks, _statement
from dpmp.mechanism._batches import Batches
from dpmp.mechanism._clipping import Clipping
from dpmp.mechanism._costs import Costs, StepCost
from dpmp.mechanism._released import Released, of_at_most
from dpmp.mechanism._resolution import choose_resolution
from dpmp.numerics import _arithmetic


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPSGD:
    """DP-SGD on Poisson-sampled batches, before or after calibration of the noise.

    In every step, DP-SGD draws a random batch, clips the gradient of each example, adds
    the clipped gradients up and adds Gaussian noise to the sum. The clipped gradient of
    one example is called its contribution. `calibrate` finds the least noise that meets
    a privacy target (epsilon, delta): for any neighbouring datasets A and B and any set
    S of outcomes, P[outcome on A in S] <= exp(epsilon) P[outcome on B in S] + delta.

    >>> mechanism = DPSGD(
    ...     num_examples=6000, expected_batch_size=60, iterations=500, l2_clip_norm=1.0
    ... ).calibrate(epsilon=4.0, delta=1e-6)
    >>> print(f"{mechanism.noise_multiplier:.3f} {mechanism.guarantee().epsilon:.3f}")
    0.720 4.000

    Guarantees:
      The noisy gradients, and everything that is computed from them, are private with
      the epsilon and delta of `.guarantee()`. `.statement()` lists the assumptions.

    Attributes:
      num_examples: the size of the dataset.
      expected_batch_size: the average number of examples in a batch. The sum of
        clipped gradients is divided by this number. If `sampling_prob` is given too,
        any number close to the average will do.
      iterations: the number of steps to account for.
      l2_clip_norm: the clip norm, or a tree of clip norms; see `clipped_grad`. Or an
        `AdaptiveClipNorm`, which follows the gradients, or an `AutomaticClipping`.
      noise_multiplier: the standard deviation of the noise over the largest norm of a
        contribution. It is None before `calibrate`, and 0 for no privacy.
      delta: the delta for which epsilon is computed, set by `calibrate`.
      truncated_batch_size: the size of the largest batch. None chooses it by
        `accounting.choose_truncated_batch_size`.
      microbatch_size: see `clipped_grad`. Batches are padded to a multiple of it. Where
        "bounded" sums choose it, they are padded to a power of two of at most 32.
      rescale_to_unit_norm: see `clipped_grad`.
      arithmetic: how the sum is computed: "exact" (None), "float32" or "float64". With
        book-keeping: "bounded" (None), or "unproved_float32", without a proof. See
        `clipped_grad`. The noise always is in integers.
      num_parameters: a public upper bound on the number of entries of the gradient. The
        resolution of the grid depends on it, and the share of delta that is charged for
        the sampler of the noise. A larger gradient is refused.
      method: the gradient engine; see `clipped_grad`.
      released_metrics: noisy means to release at every step besides the gradient.
        `DPTrainer` releases the fraction of overflows in any case, as it is free.
      neighboring_relation: which two datasets are neighbours. By default, one example
        is blanked out (zero-out): both datasets have the same size, and `num_examples`
        is public. Under ADD_OR_REMOVE_ONE, neighbours have one example more or less,
        and epsilon is the larger one of both cases. `num_examples` is protected too,
        provided that no other field was derived from it.
      sampling_prob: the probability that an example is in a batch. None computes it as
        `expected_batch_size / num_examples`, from which anyone who knows the expected
        batch size learns `num_examples`. Where that number is protected, give this
        field and `truncated_batch_size`, and choose them without that number. The noise
        that `calibrate` finds depends on it as far as truncation costs privacy.
    """

    num_examples: int
    expected_batch_size: float
    iterations: int
    l2_clip_norm: PyTree
    noise_multiplier: float | None = None
    delta: float | None = None
    truncated_batch_size: int | None = None
    microbatch_size: int | None = None
    rescale_to_unit_norm: bool = False
    arithmetic: str | None = None
    num_parameters: int = 10_000_000
    method: str = "per_example"
    released_metrics: ReleasedMetrics | None = None
    neighboring_relation: dp_accounting.NeighboringRelation = (
        accounting.DEFAULT_RELATION
    )
    sampling_prob: float | None = None

    def __post_init__(self):
        # The name of the arithmetic that runs tells a reader more than None.
        arithmetic = self.arithmetic or _arithmetic.default_name(self.method)
        checked = {"arithmetic": arithmetic, **_checks.checked_fields(self)}
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        # This call checks the other fields: clip norms, arithmetic and method.
        self._any_clipped_grad.sensitivity(self.neighboring_relation)

    @classmethod
    def from_epochs(cls, *, epochs: float, **fields: Any) -> "DPSGD":
        """Makes a mechanism with `epochs / sampling_prob` steps, rounded.

        Args:
          epochs: how often each example is used on average.
          **fields: the attributes except `iterations`.
        """
        epochs = _validate.positive(epochs=epochs, fix="Use 3, for example.")
        one_step = cls(iterations=1, **fields)
        steps = epochs / one_step.sampling.sampling_prob
        return dataclasses.replace(one_step, iterations=max(1, round(steps)))

    def calibrate(self, *, epsilon: float, delta: float) -> "DPSGD":
        """The same mechanism with the least noise that satisfies (epsilon, delta).

        Args:
          epsilon: the target after all iterations, which is not exceeded.
          delta: the target delta; choose it well below 1 / num_examples. A larger one
            is warned of.

        Raises:
          ValueError: if the target is out of range or cannot be reached.
        """
        noise_multiplier = self._costs.calibrate(epsilon=epsilon, delta=delta)
        _checks.warn_of_large_delta(delta, self.num_examples)
        return dataclasses.replace(self, noise_multiplier=noise_multiplier, delta=delta)

    def without_privacy(self) -> "DPSGD":
        """The same mechanism without clipping and noise, as a baseline to compare with.

        Its results are those of ordinary training on the same batches, up to float32
        rounding.
        """
        return dataclasses.replace(
            self,
            l2_clip_norm=jax.tree.map(lambda _: math.inf, self.l2_clip_norm),
            rescale_to_unit_norm=False,
            arithmetic=_arithmetic.name_without_privacy(self.method)
            if self._sums.resolution is not None
            else self.arithmetic,
            noise_multiplier=0.0,
        )

    @property
    def is_private(self) -> bool:
        """Whether gradients are clipped and receive noise; `guarantee` has epsilon."""
        return bool(self.noise_multiplier) and self._clipping.is_finite

    @property
    def sampling(self) -> batch_selection.PoissonSampling:
        """The sampler that the accounting assumes."""
        prob, size = self._batches.sampling_prob, self._batches.largest
        return batch_selection.PoissonSampling(prob, self.iterations, size)

    @property
    def padded_batch_size(self) -> int:
        """The size to which all batches are padded."""
        return self._batches.padded

    @property
    def stddev(self) -> float:
        """The standard deviation of the noise on the averaged gradient.

        It is in clip norms if the clip norm adapts.
        """
        bound = self._any_clipped_grad.l2_norm_bound
        return self._calibrated * bound if self._calibrated else 0.0

    @property
    def overflow_stddev(self) -> float:
        """The standard deviation of the noise on the number of overflows."""
        return self.stddev / contribution(self._clipping.l2_norm_bound)

    @property
    def initial_clip_norm(self) -> jax.Array | None:
        """The clip norm of the first step if it adapts, or else None."""
        return self._clipping.initial

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of the released metrics."""
        return self.released_metrics.names if self.released_metrics else ()

    @property
    def resolution(self) -> int | None:
        """How many units of the grid the largest contribution has; None for floats."""
        return choose_resolution(
            self.noise_multiplier or 1.0, self.num_parameters, self._sums
        )

    @property
    def dp_event(self) -> dp_accounting.DpEvent:
        """All iterations as an event of dp_accounting.

        Under ADD_OR_REMOVE_ONE, it describes the neighbour with one example more;
        `guarantee` also considers the one with one example less, which may cost more.
        """
        return self.step_cost.event(self.iterations)

    @property
    def step_cost(self) -> StepCost:
        """All facts that the privacy cost of one step depends on."""
        return self._costs.of_step(self._calibrated)

    def clipped_grad(
        self,
        fun: Callable[..., Any],
        argnums: Any = 0,
        *,
        clip_norm: Any = None,
        **kwargs: Any,
    ) -> clipping.BoundedSensitivityCallable:
        """Calls `dpmp.clipped_grad` with this mechanism's clipping and arithmetic.

        Args:
          fun: the loss.
          argnums: the positions of the arguments to differentiate.
          clip_norm: the clip norm of this step if it adapts; see `AdaptiveClipNorm`.
          **kwargs: other arguments that do not affect the sensitivity.
            `nan_safe=False`, which has no guarantee, raises ValueError.

        Returns:
          A callable that returns the sum of clipped gradients over
          `expected_batch_size`. With `released_metrics` or an `AdaptiveClipNorm`, it
          returns a `JointSum`: add noise to it with `.privatizer`, and then take it
          apart with `.split`.
        """
        _checks.check_nan_safe(kwargs.get("nan_safe", True))
        return clipping.clipped_grad(
            fun,
            argnums,
            **self._clipping.arguments(clip_norm),
            microbatch_size=self.microbatch_size,
            method=self.method,
            arithmetic=self.arithmetic,
            resolution=self.resolution,
            **kwargs,
        )

    def privatizer(
        self, prng_key: jax.Array | None = None
    ) -> optax.GradientTransformation:
        """Makes the transformation that adds noise to the output of `.clipped_grad`.

        The guarantee covers one `update` for each of `iterations` steps. `DPTrainer`
        stops after these; a training loop of your own must do so itself.

        Args:
          prng_key: see `noise_addition.gaussian_privatizer`.

        Raises:
          ValueError: before calibration, or (by `update`) for a gradient with more than
            `num_parameters` entries.
        """
        bound = self._any_clipped_grad.l2_norm_bound
        privatizer = noise_addition.gaussian_privatizer(
            stddev=self.stddev,
            prng_key=prng_key,
            l2_sensitivity=(self.is_private and bound) or None,
        )
        return of_at_most(self.num_parameters, privatizer)

    def split(self, noisy: PyTree, *, clip_norm: Any = None) -> Released:
        """Splits the output of `.privatizer`, given the `clip_norm` if it adapts."""
        return self._clipping.split(noisy, clip_norm)

    def guarantee(
        self, step: int | None = None, *, delta: float | None = None
    ) -> accounting.PrivacyGuarantee:
        """Computes epsilon after a number of steps.

        Args:
          step: the number of steps that were released; None for all iterations.
          delta: the delta; None for the one that was given to `calibrate`.

        Returns:
          Epsilon, delta and the accountant. Epsilon is infinite without clipping or
          noise, or if delta does not cover the sampler's deviation from ideal noise.

        Raises:
          ValueError: before calibration, without a delta, or for one out of range.
        """
        return self._costs.guarantee(
            self._calibrated, step, delta=self.delta if delta is None else delta
        )

    def statement(self) -> str:
        """States the privacy claim in plain words, with its assumptions and limits."""
        if not self.is_private and self.noise_multiplier is not None:
            return _statement.no_claim()
        guarantee = self.guarantee()
        if math.isinf(guarantee.epsilon):
            return _statement.no_epsilon(guarantee.delta)
        return _statement.claim(guarantee, self, self._batches, self._sums)

    @property
    def _calibrated(self) -> float:
        return _checks.calibrated(self.noise_multiplier)

    @property
    def _any_clipped_grad(self) -> clipping.BoundedSensitivityCallable:
        """Has the bounds of every clipped gradient of this mechanism."""
        return self.clipped_grad(lambda *_: 0.0, clip_norm=self.initial_clip_norm)

    @property
    def _clipping(self) -> Clipping:
        return Clipping(
            l2_clip_norm=self.l2_clip_norm,
            rescale_to_unit_norm=self.rescale_to_unit_norm,
            expected_batch_size=self.expected_batch_size,
            released_metrics=self.released_metrics,
        )

    @functools.cached_property
    def _sums(self) -> _arithmetic.Arithmetic:
        check_method(self.method)
        return _arithmetic.parse(self.arithmetic, method=self.method)

    @functools.cached_property
    def _batches(self) -> Batches:
        return Batches(
            num_examples=self.num_examples,
            sampling_prob=cast("float", self.sampling_prob),
            truncated_batch_size=self.truncated_batch_size,
            microbatch_size=self.microbatch_size,
            chooses_microbatches=self._sums.clips_by_bounds,
            neighboring_relation=self.neighboring_relation,
        )

    @property
    def _costs(self) -> Costs:
        return Costs(
            batches=self._batches,
            iterations=self.iterations,
            is_clipped=self._clipping.is_finite,
            # The entries of the gradient, up to 3 of metrics, and 1 of the clip norm.
            num_coordinates=self.num_parameters + 3 + bool(self._clipping.adaptive),
        )
