"""Splits an event into its kinds of steps, which are what accountants compose."""

import sys
from typing import Any, NamedTuple

import dp_accounting
from scipy import stats

from dpmp import _validate
from dpmp._validate import as_number
from dpmp.accounting._events import RandomAllocationDpEvent, check, sampled_event


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
    tail = float(stats.binom.sf(size, num_examples, step.sampling_prob))
    event = dp_accounting.TruncatedSubsampledGaussianDpEvent(
        num_examples, step.sampling_prob, size, step.noise_multiplier
    )
    # A probability that underflows to 0 is still above 0.
    truncation = max(tail, sys.float_info.min)
    return step._replace(truncated_event=event, truncation=truncation)


def _allocated(event: RandomAllocationDpEvent, times: int) -> Step:
    prob = 1 / event.steps
    tail = float(stats.binom.sf(event.truncated_batch_size, event.num_examples, prob))
    step = _sampled(event.noise_multiplier, prob, times)
    if event.truncated_batch_size < event.num_examples:
        truncation = event.steps * max(tail, sys.float_info.min)
        step = step._replace(truncation=truncation)
    return step if event.steps == 1 else step._replace(allocated_event=event)


class Run(NamedTuple):
    """All steps of a run, and the neighbouring relation to account for."""

    steps: tuple[Step, ...]
    relation: dp_accounting.NeighboringRelation

    @property
    def num_steps(self) -> int:
        return sum(step.times for step in self.steps)

    @property
    def event(self) -> dp_accounting.DpEvent:
        parts: list[Any] = [
            dp_accounting.SelfComposedDpEvent(s.event, s.times) for s in self.steps
        ]
        return dp_accounting.ComposedDpEvent(parts)
