"""One private training run: its sampling, clipping, arithmetic and noise."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, cast

import dp_accounting
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from dpmp import _validate, accounting, batch_selection, clipping, noise_addition
from dpmp._typing import PyTree
from dpmp._validate import as_number
from dpmp._warnings import warn
from dpmp.clipping import (
    ClipNorms,
    JointCoordinates,
    JointSum,
    Released,
    ReleasedMetrics,
    contribution,
    sensitivity,
    with_clip_norm,
)
from dpmp.engines import check_method
from dpmp.mechanism import _privacy_cost, _statement
from dpmp.mechanism._fields import (
    Default,
    check_strategy,
    checked_fields,
    chosen_names,
)
from dpmp.mechanism._privacy_cost import PrivacyCost
from dpmp.numerics import (
    Arithmetic,
    arithmetic_without_privacy,
    is_grid,
    num_entries,
    parse_arithmetic,
    unit_of,
)
from dpmp.strategies import Strategy


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPSGD:
    """DP-SGD on random batches, before or after calibration of the noise.

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
      l2_clip_norm: the clip norm, or a tree of clip norms; see `clipped_grad`. It may
        be an `AdaptiveClipNorm`, which follows the gradients, or `AutomaticClipping`.
      noise_multiplier: the standard deviation of the noise over the largest norm of a
        contribution. It is None before `calibrate`, and 0 for no privacy.
      delta: the delta for which epsilon is computed, set by `calibrate`.
      truncated_batch_size: the size of the largest batch. None chooses it by
        `accounting.choose_truncated_batch_size`.
      microbatch_size: see `clipped_grad`. Batches are padded to a multiple of it, or of
        a power of two of at most 32 where it is chosen from shapes.
      rescale_to_unit_norm: see `clipped_grad`.
      arithmetic: how the sum is computed: "exact" (None), "float32" or "float64". With
        book-keeping: "bounded" (None), or "unproved_float32", without a proof. See
        `clipped_grad`. The noise always consists of integers.
      num_parameters: a public upper bound on the number of entries of the gradient. It
        determines the resolution of the grid, and how much the reserved share of delta
        must cover for the noise sampler. A larger gradient is refused.
      method: the gradient engine; see `clipped_grad`. None chooses "book_keeping", or
        "per_example" where book-keeping has no proof: under ADD_OR_REMOVE_ONE, and for
        an arithmetic of "per_example". The field then has the name of the choice.
      released_metrics: noisy means to release at every step besides the gradient.
        `DPTrainer` releases the fraction of overflows in any case, as it is free.
      neighboring_relation: which two datasets are neighbours. By default, one example
        is replaced by padding (zero-out): both datasets have the same size, and
        `num_examples` is public. Under ADD_OR_REMOVE_ONE, a neighbour has one example
        more or less, and epsilon is the larger of the two cases. `num_examples` is
        protected too, provided that no other field was derived from it.
      sampling_prob: the probability that an example is in a batch. None computes it as
        `expected_batch_size / num_examples`, from which anyone who knows the expected
        batch size learns `num_examples`. If `num_examples` is protected, give this
        field and `truncated_batch_size`, and choose them without it. The noise that
        `calibrate` finds depends on `num_examples` as far as truncation costs privacy.
      sampling: "poisson" lets each example take part in each step independently.
        "random_allocation" lets it take part in one step of every epoch, which needs
        less noise for the same epsilon. An epoch has `num_examples` over
        `expected_batch_size` steps, rounded. Only `DPTrainer.fit` makes such steps; see
        `batch_selection.RandomAllocation`.
      strategy: correlates the noise of steps, so that it partly cancels in their sum;
        see `strategies.banded_toeplitz` and `strategies.banded_inverse`. The examples
        then form groups that take turns. None, or one band, adds independent noise.
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
    method: str | None = None
    released_metrics: ReleasedMetrics | None = None
    neighboring_relation: dp_accounting.NeighboringRelation = (
        accounting.DEFAULT_RELATION
    )
    sampling_prob: float | None = None
    sampling: str = "poisson"
    strategy: Strategy | None = None

    def __post_init__(self):
        for name, value in (checked_fields(self) | chosen_names(self)).items():
            object.__setattr__(self, name, value)
        self._clip_norms.fit(self._sums_on_grid)
        sensitivity(
            self._l2_norm_bound,
            self.neighboring_relation,
            assumes_fixed_slots=self._sums.needs_norm_bounds,
        )
        check_strategy(self)

    @classmethod
    def from_epochs(cls, *, epochs: float, **fields: Any) -> "DPSGD":
        """Makes a mechanism whose steps use each example a number of times on average.

        Args:
          epochs: how often each example is used; the number of steps is rounded.
          **fields: the attributes except `iterations`.

        Raises:
          ValueError: for a number out of range, or if `iterations` is given.
        """
        epochs = _validate.positive(epochs=epochs, fix="Use 3, for example.")
        if "iterations" in fields:
            _validate.fail(
                "the number of steps must follow from epochs. Leave iterations out, "
                "or use DPSGD(iterations=...).",
                iterations=fields.get("iterations"),
            )
        one_step = cls(iterations=1, **fields)
        steps = epochs * one_step.cycle_length / cast("float", one_step.sampling_prob)
        return dataclasses.replace(one_step, iterations=max(1, round(steps)))

    def calibrate(self, *, epsilon: float, delta: float) -> "DPSGD":
        """The same mechanism with the least noise that satisfies (epsilon, delta).

        Args:
          epsilon: the target after all iterations, which is not exceeded.
          delta: the target delta; choose it well below 1 / num_examples. From that
            number on, there is a warning.

        Raises:
          ValueError: if the target is out of range or cannot be reached.
        """
        if not self._is_clipped:
            _validate.fail(
                "the mechanism must clip to be private. Calibrate the one that "
                "without_privacy() was called on, or use a finite clip norm.",
                l2_clip_norm=self.l2_clip_norm,
            )
        noise_multiplier = _privacy_cost.calibrate(
            self._cost_with(0.0), self.iterations, epsilon=epsilon, delta=delta
        )
        if delta >= 1 / self.num_examples:
            warn(
                "delta should be well below 1 / num_examples, because publishing one "
                "random example satisfies delta = 1 / num_examples; got "
                f"delta={delta}. Use a tenth of 1 / num_examples, or less."
            )
        return dataclasses.replace(self, noise_multiplier=noise_multiplier, delta=delta)

    def without_privacy(self) -> "DPSGD":
        """The same mechanism without clipping and noise, as a baseline to compare with.

        Its results are those of ordinary training on the same batches, up to float32
        rounding.
        """
        return dataclasses.replace(
            self,
            l2_clip_norm=jax.tree.map(lambda _: math.inf, self._clip_norm_tree),
            rescale_to_unit_norm=False,
            arithmetic=arithmetic_without_privacy(self._engine)
            if self._sums.resolution is not None
            else self.arithmetic,
            noise_multiplier=0.0,
        )

    @property
    def has_default_method(self) -> bool:
        """Whether `method` was chosen, and not given."""
        return isinstance(self.method, Default)

    @property
    def is_private(self) -> bool:
        """Whether gradients are clipped and receive noise."""
        return bool(self.noise_multiplier) and self._is_clipped

    @property
    def batch_selection_strategy(
        self,
    ) -> batch_selection.PoissonSampling | batch_selection.RandomAllocation:
        """The sampler that the accounting assumes."""
        if self.steps_per_epoch is None:
            return batch_selection.PoissonSampling(
                cast("float", self.sampling_prob),
                self.iterations,
                self._largest_batch,
                self.cycle_length,
                self.num_examples,
            )
        return batch_selection.RandomAllocation(
            self.steps_per_epoch,
            self.iterations,
            self._largest_batch,
            self.num_examples,
        )

    @functools.cached_property
    def steps_per_epoch(self) -> int | None:
        """The number of steps of an epoch of random allocation; None without it."""
        return _privacy_cost.steps_per_epoch(self)

    @property
    def cycle_length(self) -> int:
        """The number of groups of examples that take turns; 1 without a strategy."""
        return self.strategy.cycle_length if self.strategy else 1

    @property
    def hides_size(self) -> bool:
        """Whether the number of examples is private, as under ADD_OR_REMOVE_ONE."""
        relations = dp_accounting.NeighboringRelation
        return self.neighboring_relation is relations.ADD_OR_REMOVE_ONE

    @property
    def largest_group(self) -> int:
        """The size of the largest of these groups."""
        return math.ceil(self.num_examples / self.cycle_length)

    @property
    def makes_steps_alone(self) -> bool:
        """Whether no secret ties a step to others, so that `train_step` may make it."""
        return self.steps_per_epoch is None and not self.has_correlated_noise

    @property
    def has_correlated_noise(self) -> bool:
        """Whether the noise of a step is correlated with that of others."""
        return self.strategy is not None and self.strategy.bands > 1

    @property
    def padded_batch_size(self) -> int:
        """The size to which all batches are padded, so that microbatches divide it."""
        multiple = self.microbatch_size or 1
        if self.microbatch_size is None and self._sums.resolution is not None:
            multiple = min(32, 2 ** (self._largest_batch.bit_length() - 1))
        return math.ceil(self._largest_batch / multiple) * multiple

    @property
    def stddev(self) -> float:
        """The standard deviation of the noise on the averaged gradient.

        It is in clip norms if the clip norm adapts.
        """
        return self._calibrated * self._l2_norm_bound if self._calibrated else 0.0

    @property
    def overflow_stddev(self) -> float:
        """The standard deviation of the noise on the number of overflows."""
        widened = 1.0 if self.strategy is None else self.strategy.width_of_counts
        return widened * self.stddev / contribution(self._clip_norms.l2_norm_bound)

    @property
    def initial_clip_norm(self) -> jax.Array | None:
        """The clip norm of the first step if it adapts, and None otherwise."""
        adaptive = self._joint.adaptive
        return None if adaptive is None else jnp.float32(adaptive.initial)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of the released metrics."""
        return self.released_metrics.names if self.released_metrics else ()

    @functools.cached_property
    def resolution(self) -> int | None:
        """The number of grid units in the largest contribution; None for floats."""
        noise_multiplier = self.noise_multiplier or 1.0
        if self.strategy is not None and self.has_correlated_noise:
            noise_multiplier *= self.strategy.widening
        return noise_addition.choose_resolution(
            noise_multiplier, self.num_parameters, self._sums
        )

    @property
    def dp_event(self) -> dp_accounting.DpEvent:
        """All iterations as an event of dp_accounting.

        Under ADD_OR_REMOVE_ONE, the event is for the neighbour with one example more.
        `guarantee` also considers one example less, which may cost more.
        """
        return self.step_cost.event(self.iterations)

    @property
    def step_cost(self) -> PrivacyCost:
        """Everything that the privacy cost of one step depends on."""
        return self._cost_with(self._calibrated)

    def clipped_grad(
        self,
        fun: Callable[..., Any],
        argnums: Any = 0,
        *,
        clip_norm: Any = None,
        counts_overflows: bool = False,
        **kwargs: Any,
    ) -> clipping.BoundedSensitivityCallable:
        """Calls `dpmp.clipped_grad` with this mechanism's clipping and arithmetic.

        Args:
          fun: the loss.
          argnums: the positions of the arguments to differentiate.
          clip_norm: the clip norm of this step if it adapts; see `AdaptiveClipNorm`.
          counts_overflows: whether to release "overflowed" in any case, as it is free;
            see `ReleasedMetrics`.
          **kwargs: other arguments that do not affect the sensitivity.
            `nan_safe=False`, which has no guarantee, raises ValueError.

        Returns:
          A callable that returns the sum of clipped gradients over
          `expected_batch_size`. If it releases anything else, it returns a `JointSum`:
          add noise to it with `.privatizer`, and then split it with `.split`.
          It raises ValueError without `is_padding_example`, because a padded batch
          repeats one of its examples, which would count once for each row of padding;
          and for more rows than `padded_batch_size`.
        """
        if not kwargs.get("nan_safe", True):
            _validate.fail(
                "a mechanism must have nan_safe=True, so that its guarantee holds",
                nan_safe=False,
                fix="Leave nan_safe out. To look for NaN on public data, use "
                "dpmp.clipped_grad.",
            )
        metrics = self.released_metrics
        if counts_overflows:
            metrics = ReleasedMetrics.with_overflows(metrics)
        own: dict[str, Any] = {
            "l2_clip_norm": with_clip_norm(self._clip_norm_tree, clip_norm),
            "rescale_to_unit_norm": self._is_in_clip_norms,
            "normalize_by": self.expected_batch_size,
            "released_metrics": metrics,
            "microbatch_size": self.microbatch_size,
            "method": self._engine,
            "arithmetic": self._sums_on_grid,
        }
        if not own.keys().isdisjoint(kwargs):
            _validate.fail(
                "the mechanism must decide on clipping, scale and arithmetic, so that "
                "its noise fits them. Set these in DPSGD(...).",
                given=sorted(own.keys() & kwargs.keys()),
            )
        unmasked = clipping.clipped_grad(fun, argnums, **own, **kwargs)

        def with_mask(*args, is_padding_example, **kwargs):
            if is_padding_example is None:
                _validate.fail(
                    "the batch must come with is_padding_example, so that an example "
                    "that fills it up does not count again",
                    is_padding_example=None,
                    fix="With padded = pad_indices(indices, "
                    "mechanism.padded_batch_size), pass is_padding_example=padded "
                    "< 0.",
                )
            # Without the number of rows, which is sensitive where nothing was padded.
            if np.size(is_padding_example) > self.padded_batch_size:
                _validate.fail(
                    "a batch must be drawn, and have at most padded_batch_size rows. "
                    "Draw indices by mechanism.batch_selection_strategy, and pad them "
                    "to mechanism.padded_batch_size.",
                    padded_batch_size=self.padded_batch_size,
                )
            return unmasked.fun(*args, is_padding_example=is_padding_example, **kwargs)

        return dataclasses.replace(unmasked, fun=with_mask)

    def privatizer(
        self, prng_key: jax.Array | None = None
    ) -> optax.GradientTransformation:
        """Makes the transformation that adds noise to the output of `.clipped_grad`.

        The guarantee covers one `update` for each of `iterations` steps. `DPTrainer`
        stops after these, and so must a training loop of your own: more updates are
        refused, or NaN under `jax.jit`.

        Args:
          prng_key: see `noise_addition.gaussian_privatizer`.

        Raises:
          ValueError: before calibration, or (by `update`) for a gradient with more than
            `num_parameters` entries, or that `.clipped_grad` has not returned.
        """
        if self.strategy is None or not self.has_correlated_noise:
            privatizer = noise_addition.gaussian_privatizer(
                stddev=self.stddev,
                prng_key=prng_key,
                l2_sensitivity=(self.is_private and self._l2_norm_bound) or None,
            )
        else:
            privatizer = noise_addition.correlated_gaussian_privatizer(
                stddev=self.stddev, prng_key=prng_key, strategy=self.strategy
            )

        def update(updates, state, params=None):
            is_joint = isinstance(updates, JointSum)
            grads = updates.sum_of_clipped_grads if is_joint else updates
            entries = num_entries(grads)
            if entries > self.num_parameters:
                _validate.fail(
                    "the gradient must have at most num_parameters entries",
                    num_parameters=self.num_parameters,
                    entries=entries,
                    fix=f"Use DPSGD(num_parameters={entries}).",
                )
            if self.resolution is not None:
                unit = unit_of(self._clip_norms.l2_norm_bound, self.resolution)
                leaves = jax.tree.leaves(grads, is_leaf=is_grid)
                if not all(is_grid(x) and x.unit == unit for x in leaves):
                    _validate.fail(
                        "the sum must have the sensitivity that the noise is for. Use "
                        "clipped_grad and privatizer of one mechanism, with nothing "
                        "between them.",
                        sum_of_clipped_grads="floats, or a sum on another grid",
                    )
            made = as_number(getattr(state, "step", 0))
            if _validate.is_integer(made) and made >= self.iterations:
                _validate.fail(
                    "there must be at most one update for each of the iterations, "
                    "which the claim is for. Plan more of them before the run starts.",
                    iterations=self.iterations,
                )
            noisy, state = privatizer.update(updates, state, params)
            if isinstance(made, jax.core.Tracer):
                is_covered = made < self.iterations
                noisy = jax.tree.map(lambda x: jnp.where(is_covered, x, jnp.nan), noisy)
            return noisy, state

        return optax.GradientTransformation(privatizer.init, update)

    def split(self, noisy: PyTree, *, clip_norm: Any = None) -> Released:
        """Splits the output of `.privatizer`, given the `clip_norm` if it adapts."""
        with_clip_norm(self._clip_norm_tree, clip_norm)  # checks that there is one
        released = self._joint.split(
            noisy, self._clip_norms.l2_norm_bound, self.expected_batch_size, clip_norm
        )
        if self._is_in_clip_norms == self.rescale_to_unit_norm:
            return released

        def times_clip_norm(x: jax.Array) -> jax.Array:
            return x * jnp.asarray(clip_norm).astype(x.dtype)

        grads = jax.tree.map(times_clip_norm, released.noisy_grads)
        return released._replace(noisy_grads=grads)

    def guarantee(
        self, step: int | None = None, *, delta: float | None = None
    ) -> accounting.PrivacyGuarantee:
        """Computes epsilon after a number of steps.

        If results led to the decision to stop there, claim all iterations; see the
        guide "Guarantees".

        Args:
          step: the number of steps that were released; None for all iterations.
          delta: the delta; None for the delta that was given to `calibrate`.

        Returns:
          Epsilon, delta and the accountant. Epsilon is infinite without clipping or
          noise, or if delta does not cover the sampler's deviation from ideal noise.

        Raises:
          ValueError: before calibration, without a delta, or for numbers out of range.
        """
        cost = self.step_cost
        steps = self.iterations if step is None else as_number(step)
        if not (_validate.is_integer(steps) and 0 <= steps <= self.iterations):
            _validate.fail(
                f"step must be an integer from 0 to iterations = {self.iterations}",
                step=step,
                fix="Use one of these, or plan more iterations before the run starts. "
                "A delta is passed by its name: guarantee(delta=1e-5).",
            )
        delta = accounting.required_delta(self.delta if delta is None else delta)
        return _privacy_cost.guarantee_of({cost: steps}, delta=delta)

    def statement(self) -> str:
        """States the privacy claim in plain words, with its assumptions and limits."""
        if not self.is_private and self.noise_multiplier is not None:
            return _statement.no_claim()
        guarantee = self.guarantee()
        if math.isinf(guarantee.epsilon):
            return _statement.no_epsilon(guarantee.delta)
        return _statement.claim(guarantee, self, self._sums)

    @property
    def _calibrated(self) -> float:
        if self.noise_multiplier is None:
            _validate.fail(
                "the mechanism must have a noise multiplier",
                noise_multiplier=None,
                fix="Use mechanism.calibrate(epsilon=, delta=).",
            )
        return self.noise_multiplier

    @functools.cached_property
    def _joint(self) -> JointCoordinates:
        return JointCoordinates.of(self.released_metrics, self._clip_norm_tree)

    @functools.cached_property
    def _clip_norm_tree(self) -> PyTree:
        """The clip norms that `stddev` is for, even if someone changes a dict later."""
        return jax.tree.map(lambda x: x, self.l2_clip_norm)

    @property
    def _is_in_clip_norms(self) -> bool:
        """Whether the sum and its noise are multiples of the clip norm."""
        return self.rescale_to_unit_norm or self._joint.adaptive is not None

    @functools.cached_property
    def _clip_norms(self) -> ClipNorms:
        adaptive = self._joint.adaptive
        return ClipNorms.from_tree(
            adaptive.initial if adaptive else self._clip_norm_tree,
            self._is_in_clip_norms,
            self.expected_batch_size,
        )

    @functools.cached_property
    def _is_clipped(self) -> bool:
        return math.isfinite(self._clip_norms.l2_norm_bound)

    @functools.cached_property
    def _l2_norm_bound(self) -> float:
        """The largest norm of a contribution to everything that receives noise."""
        return self._joint.norm_bound(self._clip_norms.l2_norm_bound)

    @property
    def _engine(self) -> str:
        return cast("str", self.method)  # set by `__post_init__`

    @functools.cached_property
    def _sums(self) -> Arithmetic:
        check_method(self._engine)
        return parse_arithmetic(self.arithmetic, method=self._engine)

    @functools.cached_property
    def _sums_on_grid(self) -> Arithmetic:
        """The arithmetic with the resolution of this mechanism, if it has a grid."""
        resolution = self.resolution
        if resolution is None:
            return self._sums
        return self._sums.with_resolution(resolution)

    @functools.cached_property
    def _largest_batch(self) -> int:
        """The size to which larger batches are truncated."""
        given = self.truncated_batch_size
        if given is None:
            return accounting.choose_truncated_batch_size(
                self.largest_group + self.hides_size,
                cast("float", self.sampling_prob),
                # Nothing but delta can pay for truncation there. If the size depended
                # on the iterations, more of them would be another cost.
                num_batches=2**20 if self.steps_per_epoch else 1,
            )
        # A given size is not lowered where it would give away the size of the data.
        return given if self.hides_size else min(given, self.num_examples)

    def _cost_with(self, noise_multiplier: float) -> PrivacyCost:
        return PrivacyCost(
            sampling_prob=float(cast("float", self.sampling_prob)),
            num_examples=self.num_examples,
            truncated_batch_size=self._largest_batch,
            noise_multiplier=noise_multiplier,
            is_clipped=self._is_clipped,
            # The entries of the gradient, up to 3 of metrics, and 1 of the clip norm.
            num_coordinates=self.num_parameters + 3 + bool(self._joint.adaptive),
            neighboring_relation=self.neighboring_relation,
            sampling=self.sampling,
            cycle_length=self.cycle_length,
        )
