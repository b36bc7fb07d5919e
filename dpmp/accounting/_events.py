"""Describes runs of DP-SGD as events for an accountant, and splits events into steps.

The events are those of dp_accounting. RDP accountants do not support truncated events.
All functions raise ValueError for an argument out of range.
"""

import bisect
import dataclasses
import sys
from typing import Any, NamedTuple

import dp_accounting
from scipy import stats

from dpmp import _validate
from dpmp._validate import as_number

# By default, one example of the first dataset is replaced by padding in the second.
DEFAULT_RELATION = dp_accounting.NeighboringRelation.REPLACE_SPECIAL

# The check of each argument, and the fix that its error message names.
_CHECKS = {
    "noise_multiplier": (_validate.nonnegative, "Use calibrate_noise_multiplier."),
    "sampling_prob": (_validate.probability, "Use expected_batch_size / num_examples."),
    "iterations": (_validate.nonnegative_integer, "Use the number of updates."),
    "num_examples": (_validate.positive_integer, "Count the examples to train on."),
    "truncated_batch_size": (_validate.positive_integer, "Use 32, for example."),
    "steps_per_epoch": (_validate.positive_integer, "Use 100, for example."),
    "num_batches": (_validate.positive_integer, "Use the number of updates."),
    "multiple_of": (_validate.positive_integer, "Use the microbatch size, or 1."),
    "epsilon": (_validate.positive, "Use 8, for example."),
    "delta": (_validate.fraction, "Pass delta=, well below 1 / num_examples."),
}


def check(**values: Any) -> list[Any]:
    """Returns the values as Python numbers; raises ValueError for invalid values."""
    return _validate.checked(_CHECKS, **values)


def check_delta(delta: Any) -> float:
    """Returns `delta` as a `float`; raises ValueError unless it is in (0, 1)."""
    return check(delta=delta)[0]


# The name by which callers say that there may be no delta, which is refused as well.
required_delta = check_delta


def check_relation(neighboring_relation: dp_accounting.NeighboringRelation) -> None:
    """Raises TypeError unless the argument is a relation of dp_accounting."""
    _validate.instance(
        dp_accounting.NeighboringRelation,
        "Use dp_accounting.NeighboringRelation.REPLACE_SPECIAL, for example.",
        error=TypeError,
        neighboring_relation=neighboring_relation,
    )


def sampled_event(
    noise_multiplier: float, sampling_prob: float
) -> dp_accounting.PoissonSampledDpEvent:
    """A step on a Poisson-sampled batch, of arguments that were checked."""
    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
    return dp_accounting.PoissonSampledDpEvent(sampling_prob, gaussian)


def dpsgd_event(
    noise_multiplier: float, iterations: int, *, sampling_prob: float
) -> dp_accounting.DpEvent:
    """The event of a run of DP-SGD on Poisson-sampled batches.

    `noise_multiplier` is the standard deviation of the noise over the largest norm of a
    contribution (the clipped gradient of one example), for every neighbouring relation.
    The accountant knows that replacing an example moves the sum twice as far.

    >>> dpsgd_event(1.0, 1000, sampling_prob=0.01).count
    1000

    Args:
      noise_multiplier: the noise multiplier; 0 gives an event that is not private.
      iterations: the number of steps; 0 gives an event that costs nothing.
      sampling_prob: the probability that an example is in a batch.

    References:
      [Abadi et al., 2016](https://arxiv.org/abs/1607.00133)
    """
    noise_multiplier, sampling_prob, iterations = check(
        noise_multiplier=noise_multiplier,
        sampling_prob=sampling_prob,
        iterations=iterations,
    )
    step = sampled_event(noise_multiplier, sampling_prob)
    return _repeat(step, noise_multiplier, iterations)


def truncated_dpsgd_event(
    noise_multiplier: float,
    iterations: int,
    *,
    sampling_prob: float,
    num_examples: int,
    truncated_batch_size: int,
) -> dp_accounting.DpEvent:
    """The event of a run of DP-SGD in which too large batches are truncated.

    A batch of more than `truncated_batch_size` examples is reduced to that many, drawn
    at random.

    >>> event = truncated_dpsgd_event(
    ...     1.0, 1000, sampling_prob=0.01, num_examples=6000, truncated_batch_size=150
    ... )
    >>> round(get_epsilon(event, delta=1e-6).epsilon, 2)
    2.12

    Args:
      noise_multiplier: see `dpsgd_event`.
      iterations: see `dpsgd_event`.
      sampling_prob: the probability that an example is drawn, before truncation.
      num_examples: the size of the larger of two neighbouring datasets. Under
        ADD_OR_REMOVE_ONE, a dataset has larger and smaller neighbours. Its epsilon is
        the larger one of two: for its own size, and for one example more.
      truncated_batch_size: the size of the largest batch.

    References:
      [Ganesh, 2025](https://arxiv.org/abs/2508.15089)
    """
    iterations, *of_step = check(
        iterations=iterations,
        num_examples=num_examples,
        sampling_prob=sampling_prob,
        truncated_batch_size=truncated_batch_size,
        noise_multiplier=noise_multiplier,
    )
    step = dp_accounting.TruncatedSubsampledGaussianDpEvent(*of_step)
    return _repeat(step, step.noise_multiplier, iterations)


@dataclasses.dataclass(frozen=True)
class RandomAllocationDpEvent(dp_accounting.DpEvent):
    """An epoch in which each example takes part in one step, drawn uniformly."""

    noise_multiplier: float  # of every step
    steps: int  # of the epoch
    num_examples: int  # of the larger of two neighbouring datasets
    truncated_batch_size: int  # the size of the largest batch


def random_allocation_event(
    noise_multiplier: float,
    iterations: int,
    *,
    steps_per_epoch: int,
    num_examples: int,
    truncated_batch_size: int,
) -> dp_accounting.DpEvent:
    """The event of a run of DP-SGD with `batch_selection.RandomAllocation`.

    An epoch that the run does not complete counts as a whole one.

    >>> event = random_allocation_event(
    ...     1.0,
    ...     1000,
    ...     steps_per_epoch=100,
    ...     num_examples=6000,
    ...     truncated_batch_size=150,
    ... )
    >>> round(get_epsilon(event, delta=1e-6).epsilon, 2)
    1.96

    Args:
      noise_multiplier: see `dpsgd_event`.
      iterations: see `dpsgd_event`.
      steps_per_epoch: the number of batches to which the examples are allocated.
      num_examples: see `truncated_dpsgd_event`.
      truncated_batch_size: the size of the largest batch. Truncation is charged to
        delta: if it is not very rare, `get_epsilon` has no answer.

    References:
      [Feldman and Shenfeld, 2025](https://arxiv.org/abs/2502.08202)
    """
    iterations, *of_epoch = check(
        iterations=iterations,
        noise_multiplier=noise_multiplier,
        steps_per_epoch=steps_per_epoch,
        num_examples=num_examples,
        truncated_batch_size=truncated_batch_size,
    )
    epoch = RandomAllocationDpEvent(*of_epoch)
    return _repeat(epoch, epoch.noise_multiplier, -(-iterations // epoch.steps))


def truncation_probability(
    num_examples: int, sampling_prob: float, truncated_batch_size: int
) -> float:
    """The probability that a batch has more than `truncated_batch_size` examples.

    It is P[Binomial(num_examples, sampling_prob) > truncated_batch_size], accurate to
    eleven digits down to 1e-300.

    >>> print(f"{truncation_probability(6000, 0.01, 150):.2g}")
    2.6e-23
    """
    num_examples, sampling_prob, truncated_batch_size = check(
        num_examples=num_examples,
        sampling_prob=sampling_prob,
        truncated_batch_size=truncated_batch_size,
    )
    return float(stats.binom.sf(truncated_batch_size, num_examples, sampling_prob))


def choose_truncated_batch_size(
    num_examples: int,
    sampling_prob: float,
    *,
    multiple_of: int = 1,
    num_batches: int = 1,
) -> int:
    """The smallest batch size that is exceeded with a probability of at most 1e-20.

    It is the probability that any of `num_batches` batches is larger.

    Truncation at this size changes epsilon by a negligible amount. It also lets
    `get_epsilon` avoid the slower and coarser analysis of truncated batches. The size
    is a multiple of `multiple_of`, at most `num_examples` rounded up to a multiple.

    >>> choose_truncated_batch_size(6000, 0.01, multiple_of=16)
    144
    """
    num_examples, sampling_prob, multiple_of, num_batches = check(
        num_examples=num_examples,
        sampling_prob=sampling_prob,
        multiple_of=multiple_of,
        num_batches=num_batches,
    )

    def is_rare(size: int) -> bool:
        tail = stats.binom.sf(size, num_examples, sampling_prob)
        return bool(num_batches * tail <= 1e-20)

    sizes = range(multiple_of, num_examples + multiple_of, multiple_of)
    return int(sizes[bisect.bisect_left(sizes, True, key=is_rare)])


def _repeat(
    step: dp_accounting.DpEvent, noise_multiplier: float, iterations: int
) -> dp_accounting.DpEvent:
    if iterations == 0:
        return dp_accounting.NoOpDpEvent()
    if noise_multiplier == 0:
        return dp_accounting.NonPrivateDpEvent()
    return dp_accounting.SelfComposedDpEvent(step, iterations)


class Step(NamedTuple):
    """A kind of step, and how many times a run takes it."""

    noise_multiplier: float
    sampling_prob: float
    times: int
    truncated_event: dp_accounting.DpEvent | None = None
    truncation: float = 0.0  # the probability that a batch is truncated
    # With random allocation, the step stands for a whole epoch.
    allocated_event: RandomAllocationDpEvent | None = None

    @property
    def event(self) -> dp_accounting.DpEvent:
        plain = sampled_event(self.noise_multiplier, self.sampling_prob)
        return self.allocated_event or self.truncated_event or plain


def steps_of(event: Any, times: int = 1) -> tuple[Step, ...]:
    """Splits an event into its kinds of steps."""
    match event:
        case dp_accounting.NoOpDpEvent() | dp_accounting.SelfComposedDpEvent(count=0):
            return ()
        case dp_accounting.NonPrivateDpEvent():
            return (_sampled(0.0, 1.0, times),)
        case dp_accounting.SelfComposedDpEvent(event=part, count=count):
            return steps_of(part, times * as_number(count))
        case dp_accounting.ComposedDpEvent(events=parts):
            return tuple(step for part in parts for step in steps_of(part, times))
        case dp_accounting.GaussianDpEvent(noise_multiplier=noise):
            return (_sampled(noise, 1.0, times),)
        case dp_accounting.PoissonSampledDpEvent(
            event=dp_accounting.GaussianDpEvent(noise_multiplier=noise)
        ):
            return (_sampled(noise, event.sampling_probability, times),)
        case dp_accounting.TruncatedSubsampledGaussianDpEvent():
            return (_truncated(event, times),)
        case RandomAllocationDpEvent():
            return (_allocated(event, times),)
    is_event = isinstance(event, dp_accounting.DpEvent)
    _validate.fail(
        "event must be made of Gaussian steps, sampled, truncated or composed. Use "
        "dpsgd_event. For other mechanisms, use an accountant of dp_accounting.",
        event=event,
        error=_validate.RefusedError if is_event else TypeError,
    )


def _sampled(noise_multiplier: float, sampling_prob: float, times: int) -> Step:
    given = {"noise_multiplier": noise_multiplier, "sampling_prob": sampling_prob}
    noise_multiplier, sampling_prob = check(**given)
    return Step(noise_multiplier, sampling_prob, times)


def _truncated(event: Any, times: int) -> Step:
    step = _sampled(event.noise_multiplier, event.sampling_probability, times)
    num_examples = as_number(event.dataset_size)
    size = as_number(event.truncated_batch_size)
    if size >= num_examples:
        return step
    event = dp_accounting.TruncatedSubsampledGaussianDpEvent(
        num_examples, step.sampling_prob, size, step.noise_multiplier
    )
    tail = _tail(size, num_examples, step.sampling_prob)
    return step._replace(truncated_event=event, truncation=tail)


def _allocated(event: RandomAllocationDpEvent, times: int) -> Step:
    step = _sampled(event.noise_multiplier, 1 / event.steps, times)
    size, num_examples = event.truncated_batch_size, event.num_examples
    if size < num_examples:
        tail = event.steps * _tail(size, num_examples, step.sampling_prob)
        step = step._replace(truncation=tail)
    return step if event.steps == 1 else step._replace(allocated_event=event)


def _tail(size: int, num_examples: int, sampling_prob: float) -> float:
    """The probability of a larger batch; above 0, also where it underflows."""
    tail = float(stats.binom.sf(size, num_examples, sampling_prob))
    return max(tail, sys.float_info.min)
