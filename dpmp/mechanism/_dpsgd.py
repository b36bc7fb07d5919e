"""DPSGD: one frozen description of sampling, clipping, arithmetic, noise and event.

What is run and what is accounted for come from the same object, so that they cannot
drift apart.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import dp_accounting
import jax
import optax

from dpmp import _validate, accounting, batch_selection, clipping, noise_addition
from dpmp._typing import PyTree
from dpmp.accounting._relation import DEFAULT_RELATION
from dpmp.clipping._clip_norms import ClipNorms
from dpmp.clipping._joint_sums import JointSum, ReleasedMetrics, contribution
from dpmp.engines._methods import check_method
from dpmp.mechanism import _checks, _statement
from dpmp.mechanism._costs import Costs, larger_sizes
from dpmp.mechanism._released import Released, split
from dpmp.mechanism._resolution import choose_resolution
from dpmp.numerics._arithmetic import (
    Arithmetic,
    default_name,
    name_without_privacy,
    parse,
)
from dpmp.numerics._sums import num_entries

_Relation = dp_accounting.NeighboringRelation


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPSGD:
    """DP-SGD on Poisson-sampled batches, before or after calibration.

    >>> mechanism = DPSGD(
    ...     num_examples=10_000,
    ...     expected_batch_size=100,
    ...     iterations=500,
    ...     l2_clip_norm=1.0,
    ... ).calibrate(epsilon=4.0, delta=1e-6)
    >>> print(f"{mechanism.noise_multiplier:.3f} {mechanism.guarantee().epsilon:.3f}")
    0.720 4.000

    Guarantees:
      The released sequence of noisy gradients, and so anything computed from it, is
      (epsilon, delta)-differentially private with the values of `.guarantee()`, under
      the assumptions that `.statement()` spells out.

    Attributes:
      num_examples: the size of the dataset; public, except under ADD_OR_REMOVE_ONE.
      expected_batch_size: how many examples a batch has on average. The sampling
        probability is this over `num_examples`, the sum of gradients is divided by it.
      iterations: the number of steps to account for.
      l2_clip_norm: the clip norm, or a tree of them, as in `clipped_grad`.
      noise_multiplier: standard deviation of the noise over the largest contribution
        of one example, None before `calibrate`, 0 for no privacy.
      delta: the delta that epsilon is quoted at, set by `calibrate`.
      truncated_batch_size: the largest batch; None for a size that is exceeded with a
        probability below 1e-20 (`accounting.choose_truncated_batch_size`).
      microbatch_size: as in `clipped_grad`; batches are padded to a multiple of it, or
        of a power of two up to 32 where "bounded" sums choose their own.
      rescale_to_unit_norm: as in `clipped_grad`.
      arithmetic: of the sum: "exact" integers (None), or "float32", "float32x2",
        "float64"; for book-keeping "bounded" (None), or floats without a proof,
        "unproved_float32". See `clipped_grad`. The noise is made of integers in each
        case.
      num_parameters: an upper bound on the number of entries of the gradient, public.
        It decides on the resolution of the grid and on what sampling from a table
        costs; larger gradients are refused.
      method: the gradient engine, as in `clipped_grad`.
      released_metrics: noisy means to release at every step besides the gradient.
      neighboring_relation: which two datasets are neighbours. By default (zero-out)
        they have the same size, as `num_examples` is public. Under ADD_OR_REMOVE_ONE
        that number is protected too, if none of the other fields was derived from it,
        and truncation is charged for the worse of the datasets next to this one.
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
    neighboring_relation: dp_accounting.NeighboringRelation = DEFAULT_RELATION

    def __post_init__(self):
        # Frozen, but a name that says what is run is worth more than None.
        name = self.arithmetic or default_name(self.method)
        object.__setattr__(self, "arithmetic", name)
        for name, value in _checks.checked_fields(self).items():
            object.__setattr__(self, name, value)
        # Checks what is left: clip norms, arithmetic and method.
        self.clipped_grad(lambda *_: 0.0).sensitivity(self.neighboring_relation)

    @classmethod
    def from_epochs(cls, *, epochs: float, **fields: Any) -> "DPSGD":
        """As the constructor, with `iterations` from a number of expected epochs.

        Args:
          epochs: how often each example is used on average.
          **fields: the other attributes.

        Returns:
          A mechanism of `epochs * num_examples / expected_batch_size` steps, rounded:
          a number that tells `num_examples`, where that is not public.
        """
        epochs = _validate.positive(epochs=epochs, fix="Use 3, for example.")
        one_step = cls(iterations=1, **fields)
        steps = epochs * one_step.num_examples / one_step.expected_batch_size
        return dataclasses.replace(one_step, iterations=max(1, round(steps)))

    def calibrate(self, *, epsilon: float, delta: float) -> "DPSGD":
        """The same mechanism with the least noise that satisfies (epsilon, delta).

        Args:
          epsilon: the target after all iterations.
          delta: well below 1 / num_examples.

        Returns:
          A mechanism with `noise_multiplier` and `delta` set. It errs on the private
          side: its epsilon is at most the target.

        Raises:
          ValueError: for a target that is out of range or cannot be reached.
        """
        noise_multiplier = self._costs.calibrate(epsilon=epsilon, delta=delta)
        return dataclasses.replace(self, noise_multiplier=noise_multiplier, delta=delta)

    def without_privacy(self) -> "DPSGD":
        """The same sampling with no clipping and no noise, in floating point.

        The baseline to compare with: through the same code, equal to ordinary training
        on the same batches up to float32 rounding.
        """
        return dataclasses.replace(
            self,
            l2_clip_norm=jax.tree.map(lambda _: math.inf, self.l2_clip_norm),
            rescale_to_unit_norm=False,
            arithmetic=name_without_privacy(self.method)
            if self._sums.needs_clipping
            else self.arithmetic,
            noise_multiplier=0.0,
        )

    @property
    def is_private(self) -> bool:
        """Whether there are clipping and noise; see `guarantee` for what they give."""
        return bool(self.noise_multiplier) and math.isfinite(self._l2_norm_bound)

    @property
    def sampling_prob(self) -> float:
        """The probability that an example is in a batch."""
        return self.expected_batch_size / self.num_examples

    @property
    def sampling(self) -> batch_selection.PoissonSampling:
        """The sampler that the accounting assumes."""
        return batch_selection.PoissonSampling(
            self.sampling_prob, self.iterations, self._largest_batch
        )

    @property
    def padded_batch_size(self) -> int:
        """The static size that batches are padded to."""
        multiple = self._multiple_of_batches
        return math.ceil(self._largest_batch / multiple) * multiple

    @property
    def stddev(self) -> float:
        """Standard deviation of the noise on the averaged gradient."""
        return self._calibrated * self._joint_norm_bound if self._calibrated else 0.0

    @property
    def overflow_stddev(self) -> float:
        """Standard deviation of the noise on a count of overflows, in examples."""
        one = contribution(self._l2_norm_bound)
        return self.stddev / one if one else math.inf

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Of `released_metrics`."""
        return self.released_metrics.names if self.released_metrics else ()

    @property
    def resolution(self) -> int | None:
        """How many units of the grid the largest contribution has; None for floats."""
        return choose_resolution(
            self.noise_multiplier or 1.0, self.num_parameters, self._sums
        )

    @property
    def dp_event(self) -> dp_accounting.DpEvent:
        """What the accountant is told about all iterations.

        Under ADD_OR_REMOVE_ONE, about datasets of `num_examples` and one more; those of
        `num_examples` and one less may cost more, and `guarantee` looks at both.
        """
        return self._costs.event(self._calibrated, self.iterations)

    def clipped_grad(
        self, fun: Callable[..., Any], argnums: Any = 0, **kwargs: Any
    ) -> clipping.BoundedSensitivityCallable:
        """`dpmp.clipped_grad` with this mechanism's clipping and arithmetic.

        Args:
          fun: the loss.
          argnums: which arguments to differentiate.
          **kwargs: arguments of `clipped_grad` that do not affect the sensitivity, such
            as `has_aux`, `batch_argnums` or `return_values`.

        Returns:
          The callable; its output is divided by `expected_batch_size`. With
          `released_metrics` it is a `JointSum`, to get noise as it is (`.privatizer`)
          and be taken apart after that (`.split`).

        Raises:
          ValueError: for `nan_safe=False`, which has no guarantee.
        """
        _validate.require(
            kwargs.get("nan_safe", True),
            "a mechanism must select away what is not finite",
            nan_safe=False,
            fix="Use dpmp.clipped_grad to look for NaN, on public data.",
        )
        return clipping.clipped_grad(
            fun,
            argnums,
            l2_clip_norm=self.l2_clip_norm,
            rescale_to_unit_norm=self.rescale_to_unit_norm,
            normalize_by=self.expected_batch_size,
            microbatch_size=self.microbatch_size,
            method=self.method,
            arithmetic=self.arithmetic,
            resolution=self.resolution,
            released_metrics=self.released_metrics,
            **kwargs,
        )

    def privatizer(
        self, prng_key: jax.Array | None = None
    ) -> optax.GradientTransformation:
        """The noise for the output of `.clipped_grad`.

        What is accounted for is one `update` for each of `iterations` steps; it is up
        to a loop of your own to stop there (`DPTrainer` does).

        Args:
          prng_key: as in `noise_addition.gaussian_privatizer`.

        Returns:
          An `optax.GradientTransformation`.

        Raises:
          ValueError: before calibration, and when called, for more entries than
            `num_parameters`.
        """
        privatizer = noise_addition.gaussian_privatizer(
            stddev=self.stddev,
            prng_key=prng_key,
            l2_sensitivity=(self.is_private and self._joint_norm_bound) or None,
        )

        def update(updates, state, params=None):
            grads = updates
            if isinstance(updates, JointSum):
                grads = updates.sum_of_clipped_grads
            _checks.check_num_parameters(num_entries(grads), self.num_parameters)
            return privatizer.update(updates, state, params)

        return optax.GradientTransformation(privatizer.init, update)

    def split(self, noisy: PyTree) -> Released:
        """What comes out of `.privatizer`: gradients, overflows and metrics."""
        return split(
            noisy,
            self._l2_norm_bound,
            self.expected_batch_size,
            self.released_metrics,
        )

    def guarantee(
        self, step: int | None = None, *, delta: float | None = None
    ) -> accounting.PrivacyGuarantee:
        """Epsilon after a number of steps.

        Args:
          step: how many steps have been released; None for all iterations.
          delta: None for the one given to `calibrate`.

        Returns:
          Epsilon, delta, and how they were computed. Epsilon is infinite without
          clipping or noise, and where delta leaves no room for what the sampler of the
          noise falls short of (`mechanism/_sampler_share.py`).

        Raises:
          ValueError: before calibration, for a delta that is missing or out of range,
            and for a step beyond `iterations`.
        """
        return self._costs.guarantee(
            self._calibrated, step, delta=self.delta if delta is None else delta
        )

    def statement(self) -> str:
        """The privacy claim in plain words, with its assumptions and limits.

        Raises:
          ValueError: before calibration, and without a delta.
        """
        if not self.is_private and self.noise_multiplier is not None:
            return _statement.no_claim()
        guarantee = self.guarantee()
        if math.isinf(guarantee.epsilon):
            return _statement.no_epsilon(guarantee.delta)
        return _statement.claim(
            guarantee,
            self.sampling,
            num_examples=self.num_examples,
            expected_batch_size=self.expected_batch_size,
            l2_clip_norm=self.l2_clip_norm,
            noise_multiplier=self._calibrated,
            arithmetic=self._sums,
            microbatch_size=self.microbatch_size,
            resolution=self.resolution,
            released_metrics=self.released_metrics,
        )

    @property
    def _calibrated(self) -> float:
        if self.noise_multiplier is None:
            _validate.fail(
                "the mechanism must have a noise multiplier",
                noise_multiplier=None,
                fix="Use mechanism.calibrate(epsilon=, delta=).",
            )
        return self.noise_multiplier

    @property
    def _l2_norm_bound(self) -> float:
        """The largest contribution of an example to the averaged gradient."""
        return ClipNorms.from_tree(
            self.l2_clip_norm, self.rescale_to_unit_norm, self.expected_batch_size
        ).l2_norm_bound

    @property
    def _joint_norm_bound(self) -> float:
        """The same, to all that is released at a step."""
        return self.clipped_grad(lambda *_: 0.0).l2_norm_bound

    @functools.cached_property
    def _sums(self) -> Arithmetic:
        check_method(self.method)
        return parse(self.arithmetic, method=self.method)

    @functools.cached_property
    def _largest_batch(self) -> int:
        num_examples = max(larger_sizes(self.num_examples, self.neighboring_relation))
        if self.truncated_batch_size is not None:
            return min(self.truncated_batch_size, num_examples)
        return accounting.choose_truncated_batch_size(
            num_examples, self.sampling_prob, multiple_of=self.microbatch_size or 1
        )

    @property
    def _multiple_of_batches(self) -> int:
        """Of the size of padded batches, so that microbatches can divide it."""
        if self.microbatch_size is not None or not self._sums.clips_by_bounds:
            return self.microbatch_size or 1
        return min(32, 2 ** (self._largest_batch.bit_length() - 1))

    @property
    def _costs(self) -> Costs:
        return Costs(
            num_examples=self.num_examples,
            sampling_prob=self.sampling_prob,
            iterations=self.iterations,
            largest_batch=self._largest_batch,
            is_clipped=math.isfinite(self._l2_norm_bound),
            # The gradient, and whatever a `JointSum` adds.
            num_coordinates=self.num_parameters + 3,
            neighboring_relation=self.neighboring_relation,
        )
