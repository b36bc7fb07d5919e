"""Compares runs that meet one privacy target and process equally many examples."""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

from dpmp import _validate, strategies
from dpmp.mechanism import DPSGD

# A mean gradient has a norm of at most 1, in clip norms.
LARGEST_NOISE_NORM = 10
_FEWEST_STEPS = 20
_NUM_SIZES = 7
_NEARLY_BEST = 0.75
_BANDS = 2, 4, 8, 16


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run that meets a privacy target.

    Attributes:
      batch_size: the expected number of examples in a step.
      iterations: the number of steps.
      noise_multiplier: the least noise that meets the target, in clip norms.
    """

    batch_size: int
    iterations: int
    noise_multiplier: float

    @property
    def noise_in_mean(self) -> float:
        """The standard deviation of the noise in the mean gradient, in clip norms."""
        return self.noise_multiplier / self.batch_size

    def noise_norm(self, num_trained: int) -> float:
        """The norm of the noise in the mean gradient of so many entries, in clip norms.

        It is the root of its mean square. The norm of the mean gradient is at most 1.
        """
        return self.noise_in_mean * math.sqrt(num_trained)

    def is_too_noisy(self, num_trained: int) -> bool:
        """Whether one step is almost all noise, so that fewer entries are better."""
        return self.noise_norm(num_trained) > LARGEST_NOISE_NORM

    @property
    def signal_over_noise(self) -> float:
        """Signal over noise in the sum of all steps, for gradients of one clip norm."""
        return math.sqrt(self.iterations) / self.noise_in_mean


def compare_batch_sizes(
    *,
    num_examples: int,
    epsilon: float,
    delta: float,
    num_processed: float,
    sizes: Sequence[int] | None = None,
    **fields: Any,
) -> list[Plan]:
    """Calibrates runs with different batch sizes that process equally many examples.

    Args:
      num_examples: the size of the dataset.
      epsilon: the target after the run.
      delta: the target delta.
      num_processed: the number of examples in all batches together, on average. The
        running time is proportional to it.
      sizes: the batch sizes to compare. None takes the seven largest powers of two,
        from 16 to half of the dataset, with which there are at least 20 steps. Smaller
        batches have more noise, and many steps take long to account for.
      **fields: other attributes of `DPSGD`, such as `neighboring_relation`.

    Returns:
      A plan for each size, smallest batches first.

    Raises:
      ValueError: if no size is left, or if a number is out of range.
    """
    num_processed = _validate.positive(
        num_processed=num_processed, fix="Use 10 * num_examples, for example."
    )
    _validate.instance(
        (Sequence, type(None)), "Use sizes=[64, 128], or None.", sizes=sizes
    )
    largest = min(num_examples / 2, num_processed / _FEWEST_STEPS)
    if sizes is None:
        sizes = [2**k for k in range(4, 40) if 2**k <= largest][-_NUM_SIZES:]
    if not sizes:
        _validate.fail(
            f"there must be 32 examples, and {_FEWEST_STEPS} steps with batches of 16",
            num_examples=num_examples,
            num_processed=num_processed,
            fix="Process more examples, or pass sizes.",
        )
    plans = []
    for size in sorted(sizes):
        mechanism = DPSGD(
            num_examples=num_examples,
            expected_batch_size=size,
            iterations=max(1, round(num_processed / size)),
            l2_clip_norm=1.0,
            **fields,
        ).calibrate(epsilon=epsilon, delta=delta)
        noise_multiplier = mechanism.noise_multiplier or 0.0
        plans.append(Plan(size, mechanism.iterations, noise_multiplier))
    return plans


@dataclasses.dataclass(frozen=True)
class NoiseChoice:
    """A way to draw batches and noise for one run, which meets a privacy target.

    Attributes:
      mechanism: the run, calibrated.
      error: the root mean square of the noise in the sums of all updates so far, for
        SGD with a constant learning rate, in units of the largest contribution. Times
        the learning rate and the clip norm, over the expected batch size, this is the
        error of a parameter.
    """

    mechanism: DPSGD
    error: float

    def __str__(self) -> str:
        return f"{self.name}: error {self.error:.3g}"

    @property
    def name(self) -> str:
        """The value of `sampling`, or the number of bands of the matrix or inverse."""
        strategy = self.mechanism.strategy
        if strategy is None:
            return self.mechanism.sampling
        is_inverse = isinstance(strategy, strategies.BandedInverse)
        return f"{strategy.bands} bands{' of the inverse' if is_inverse else ''}"

    @property
    def bytes_per_parameter(self) -> int:
        """The memory for the noise of earlier steps."""
        strategy = self.mechanism.strategy
        return 4 * strategy.stored_steps if strategy else 0


def compare_noise(
    mechanism: DPSGD, *, epsilon: float, delta: float, momentum: float = 0.0
) -> list[NoiseChoice]:
    """Calibrates a run with Poisson sampling, random allocation and correlated noise.

    Args:
      mechanism: the run; its noise, its `sampling` and its `strategy` are replaced.
      epsilon: the target after the run.
      delta: the target delta.
      momentum: that of the optimizer; see `strategies.Strategy.error`.

    Returns:
      The choices that the other fields of the mechanism allow, least error first.

    Raises:
      ValueError: if a number is out of range, or Poisson sampling cannot meet the
        target.
    """
    fix = "Use dpmp.DPSGD(...), or the mechanism of your trainer."
    _validate.instance(DPSGD, fix, mechanism=mechanism)
    steps = mechanism.iterations
    of_epoch = round(mechanism.num_examples / mechanism.expected_batch_size)
    independent = strategies.banded_toeplitz(1, iterations=steps)
    makers = (
        strategies.banded_toeplitz,
        functools.partial(strategies.banded_inverse, steps_per_epoch=of_epoch),
    )

    def choice(
        strategy: strategies.Strategy | None = None, sampling: str = "poisson"
    ) -> NoiseChoice:
        calibrated = dataclasses.replace(
            mechanism, sampling=sampling, strategy=strategy
        ).calibrate(epsilon=epsilon, delta=delta)
        error = (strategy or independent).error(momentum=momentum)
        return NoiseChoice(calibrated, (calibrated.noise_multiplier or 0.0) * error)

    found = [choice()]
    with contextlib.suppress(_validate.RefusedError):
        found.append(choice(sampling="random_allocation"))
    for make, bands in itertools.product(makers, _BANDS):
        with contextlib.suppress(_validate.RefusedError):
            strategy = make(bands, iterations=steps, momentum=momentum)
            found.append(choice(strategy))
    return sorted(found, key=lambda choice: choice.error)


def plan_to_start_from(plans: Sequence[Plan]) -> Plan:
    """Chooses the smallest batch that gives nearly the best signal over noise.

    Larger batches have less relative noise, and smaller batches make more steps. So
    this is the plan with the most steps within 25 % of the best `signal_over_noise`.
    """
    if not isinstance(plans, Sequence) or not plans:
        _validate.fail(
            "there must be a plan. Pass what compare_batch_sizes returns.", plans=plans
        )
    best = max(plan.signal_over_noise for plan in plans)
    good = [x for x in plans if x.signal_over_noise >= _NEARLY_BEST * best]
    return min(good, key=lambda plan: plan.batch_size)
