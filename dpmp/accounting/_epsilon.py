"""Epsilon of Gaussian steps: which accountant to ask, and on which grid.

The analysis is dp_accounting's. Accountants compute in floating point, too: what their
rounding can amount to is charged for.
"""

import functools
import math
import sys
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import dp_accounting
import numpy as np
from dp_accounting import pld, rdp
from scipy import special, stats

from dpmp import _validate
from dpmp._numbers import as_number

_Relation = dp_accounting.NeighboringRelation
_Bound: TypeAlias = tuple[float, str]  # epsilon, and the accountant in words

# Points in the grid of one step and of all: a few seconds and 0.5 GB at the most.
_STEP_POINTS, _TOTAL_POINTS = 1e5, 6e5
# An interval of a step's standard deviation / 80 moves epsilon by 1e-5 of itself. One
# above 100 is needed where epsilon is beyond 1e4, and Renyi DP says as much.
_POINTS_PER_STDDEV, _LARGEST_INTERVAL = 80, 100.0
# Room for the last roundings of a result, relative.
_MARGIN = 1e-6
# Below 3.5, the series for orders that are not integers need not converge.
_RDP_ORDERS = (2, 3, *np.arange(3.5, 11, 0.1), *range(11, 64), 96, 128, 256, 512, 1024)


def sampled_gaussian(
    noise_multiplier: float, sampling_prob: float
) -> dp_accounting.DpEvent:
    """The event of one step on a Poisson-sampled batch."""
    noise_multiplier, sampling_prob = _checked(noise_multiplier, sampling_prob)
    return dp_accounting.PoissonSampledDpEvent(
        sampling_prob, dp_accounting.GaussianDpEvent(noise_multiplier)
    )


@dataclass(frozen=True)
class _Step:
    """One kind of step of a run, and how often it is taken."""

    noise_multiplier: float
    sampling_prob: float
    count: int
    truncation: float = 0.0
    truncated_event: dp_accounting.DpEvent | None = None

    def __post_init__(self):
        checked = _checked(self.noise_multiplier, self.sampling_prob)
        for name, value in zip(
            ("noise_multiplier", "sampling_prob"), checked, strict=True
        ):
            object.__setattr__(self, name, value)

    @property
    def event(self) -> dp_accounting.DpEvent:
        return self.truncated_event or sampled_gaussian(
            self.noise_multiplier, self.sampling_prob
        )


def steps_of(event: Any, count: int = 1) -> list[_Step]:
    """Takes an event apart."""
    match event:
        case dp_accounting.NoOpDpEvent() | dp_accounting.SelfComposedDpEvent(count=0):
            return []
        case dp_accounting.NonPrivateDpEvent():
            return [_Step(0.0, 1.0, count)]
        case dp_accounting.SelfComposedDpEvent(event=part, count=times):
            return steps_of(part, count * as_number(times))
        case dp_accounting.ComposedDpEvent(events=parts):
            return [step for part in parts for step in steps_of(part, count)]
        case dp_accounting.GaussianDpEvent(noise_multiplier=noise):
            return [_Step(noise, 1.0, count)]
        case dp_accounting.PoissonSampledDpEvent(
            event=dp_accounting.GaussianDpEvent(noise_multiplier=noise)
        ):
            return [_Step(noise, event.sampling_probability, count)]
        case dp_accounting.TruncatedSubsampledGaussianDpEvent(
            dataset_size=num_examples, truncated_batch_size=size
        ):
            size, num_examples = as_number(size), as_number(num_examples)
            step = _Step(event.noise_multiplier, event.sampling_probability, count)
            if size >= num_examples:
                return [step]
            # What underflows is still more than nothing.
            prob = step.sampling_prob
            tail = max(
                float(stats.binom.sf(size, num_examples, prob)), sys.float_info.min
            )
            in_python_numbers = dp_accounting.TruncatedSubsampledGaussianDpEvent(
                num_examples, prob, size, step.noise_multiplier
            )
            return [replace(step, truncation=tail, truncated_event=in_python_numbers)]
    _validate.fail(
        "event must be made of Gaussian steps, sampled, truncated or composed",
        event=event,
        fix="Use dpsgd_event; for other mechanisms, an accountant of dp_accounting.",
        error=ValueError if isinstance(event, dp_accounting.DpEvent) else TypeError,
    )


class Run(NamedTuple):
    """All steps, and the relation they are accounted for under."""

    steps: list[_Step]
    relation: _Relation

    @property
    def num_steps(self) -> int:
        return sum(step.count for step in self.steps)


def bound(run: Run, delta: float) -> _Bound:
    """Epsilon and its accountant, by the tightest method that has an answer."""
    if not run.steps:
        return 0.0, "nothing is released"
    if any(step.noise_multiplier == 0 for step in run.steps):
        return math.inf, "no noise, no privacy"
    for method in _METHODS:
        # Where noise is next to nothing, dp_accounting overflows.
        try:
            with np.errstate(all="ignore"):
                epsilon, accountant = method(run, delta)
        except (ArithmeticError, ValueError):
            continue
        if math.isfinite(epsilon):
            return float(epsilon), accountant
    return _NO_ANSWER


def _gaussian_bound(run: Run, delta: float) -> _Bound:
    """Without sampling, steps compose to one Gaussian mechanism."""
    if any(step.sampling_prob < 1 or step.truncation for step in run.steps):
        return _NO_ANSWER
    signal = math.hypot(
        *(step.count**0.5 / step.noise_multiplier for step in run.steps)
    )
    if run.relation is _Relation.REPLACE_ONE:
        signal *= 2
    epsilon = dp_accounting.get_epsilon_gaussian(
        1 / signal, delta * (1 - _MARGIN), tol=1e-15
    )
    return epsilon, "exact Gaussian mechanism"


def _pld_bound(run: Run, delta: float) -> _Bound:
    interval, rounding = _grid(run)
    if interval > _LARGEST_INTERVAL or rounding > delta / 2:
        return _NO_ANSWER
    accountant = pld.PLDAccountant(run.relation, interval)
    for step in run.steps:
        accountant.compose(step.event, step.count)
    delta -= rounding
    epsilon = accountant.get_epsilon(delta * (1 - _MARGIN)) * (1 + _MARGIN)
    if epsilon > 600 and accountant.get_delta(800) <= delta:
        # get_epsilon sums exp(-loss), subnormal from 708 on and 0 from 745 on;
        # get_delta does not.
        search = pld.common.BinarySearchParameters(0, 800, tolerance=1e-3)
        found = pld.common.inverse_monotone_function(
            accountant.get_delta, delta, search
        )
        epsilon = math.inf if found is None else found
    is_confirmed = accountant.get_delta(epsilon) <= delta
    return (epsilon, "privacy loss distributions") if is_confirmed else _NO_ANSWER


def _rdp_bound(run: Run, delta: float) -> _Bound:
    accountant = rdp.RdpAccountant(_RDP_ORDERS, run.relation)
    if not all(accountant.supports(step.event) for step in run.steps):
        return _NO_ANSWER
    for step in run.steps:
        accountant.compose(step.event, step.count)
    # Series are cut at 1e-13. Rounding turns a divergence that is next to nothing
    # negative, and overflow turns one into NaN: dp_accounting takes both for no loss.
    rounding = 1e-12 * run.num_steps
    divergences = np.nan_to_num(
        accountant.rdp * (1 + 1e-12) + rounding, nan=math.inf, posinf=math.inf
    )
    epsilon, _ = rdp.compute_epsilon(_RDP_ORDERS, divergences.tolist(), delta)
    return epsilon, "Renyi differential privacy"


def _untruncated_bound(run: Run, delta: float, *, share: float) -> _Bound:
    """Pays for truncation with a share of delta, and analyses the run without it.

    With M the run, N the run that does not truncate, and t the probability that N has a
    batch above the limit: coupled, they agree until then, so on any one dataset
    |P[M in S] - P[N in S]| <= t. If N is (epsilon, d)-DP, then for neighbours A and B
      P[M(A) in S] <= P[N(A) in S] + t <= e^epsilon P[N(B) in S] + d + t
                   <= e^epsilon P[M(B) in S] + d + (1 + e^epsilon) t.
    """
    tail = math.fsum(step.count * step.truncation for step in run.steps)
    if not 0 < 2 * tail <= delta * share:
        return _NO_ANSWER
    plain = [replace(step, truncation=0.0, truncated_event=None) for step in run.steps]
    epsilon, accountant = bound(Run(plain, run.relation), delta * (1 - share))
    log_price = math.log(tail) + np.logaddexp(0.0, epsilon)
    if log_price > math.log(delta * share):
        return _NO_ANSWER
    return epsilon, f"{accountant}, with truncation charged to delta"


_NO_ANSWER = math.inf, ""
_METHODS = (
    _gaussian_bound,
    functools.partial(_untruncated_bound, share=1e-4),
    _pld_bound,
    _rdp_bound,
    functools.partial(_untruncated_bound, share=0.5),
)


def _grid(run: Run) -> tuple[float, float]:
    """The interval of the grid, and what rounding can do to delta."""
    width = max(_loss_scale(step, run.relation)[0] for step in run.steps)
    moment = total_moment(run)
    stddev = math.sqrt(moment / run.num_steps)
    # dp_accounting cuts the sum of all losses by the Chernoff bounds of these orders.
    span = min(70 * width / k + k * moment / width for k in range(1, 21))
    interval = max(
        stddev / _POINTS_PER_STDDEV,
        width / _STEP_POINTS,
        min(span, run.num_steps * width) / _TOTAL_POINTS,
        # Probabilities are second differences of deltas over the interval. If that is
        # smaller, the last bits of the deltas show.
        math.sqrt(1e-13 * run.num_steps * stddev),
    )
    # A delta of a step is the difference of two numbers in [0, 1]; one is exp of terms
    # as large as the losses. If all are wrong by at most r, the step with an atom of r
    # at infinity dominates the true one; the atoms add up over the steps, and so do the
    # roundings of the power of the Fourier transform. Measured against exact values,
    # the error stays below 5e-17 per step.
    return interval, sys.float_info.epsilon * (4 + width) * run.num_steps


def total_moment(run: Run) -> float:
    return math.fsum(s.count * _loss_scale(s, run.relation)[1] for s in run.steps)


def _loss_scale(step: _Step, relation: _Relation) -> tuple[float, float]:
    """Range and second moment of the privacy loss of a step, for choosing a grid."""
    width, moment = _sampled_loss_scale(step.noise_multiplier, step.sampling_prob)
    if relation is _Relation.REPLACE_ONE:
        width, moment = 2 * width, 4 * moment
    if step.truncation:
        # dp_accounting mixes in the replacement of an example that falls out.
        wide, more = _sampled_loss_scale(step.noise_multiplier / 2, step.sampling_prob)
        width = max(width, 2 * wide)
        moment += 4 * more * min(1.0, step.truncation / step.sampling_prob)
    return width, moment


def _sampled_loss_scale(noise: float, prob: float) -> tuple[float, float]:
    noise = max(noise, 1e-9)  # of which more than this need not be known
    precision = noise**-2
    reach = precision / 2 + 10.5 / noise  # dp_accounting cuts noise off at exp(-50)
    rest, sampled = special.log1p(-prob), math.log(prob)
    low, high = np.logaddexp(rest, [sampled - reach, sampled + reach])
    moment = min(
        prob**2 * special.expm1(precision),
        prob * (precision**2 / 4 + precision) + prob**2,
    )
    return float(high - low), float(moment)


def _checked(noise_multiplier: float, sampling_prob: float) -> tuple[float, float]:
    """Both as Python numbers; raises ValueError for one that is out of range."""
    return (
        _validate.nonnegative(
            noise_multiplier=noise_multiplier, fix="Use calibrate_noise_multiplier."
        ),
        _validate.probability(
            sampling_prob=sampling_prob, fix="Use expected_batch_size / num_examples."
        ),
    )
