"""Computes epsilon of Gaussian steps: chooses an accountant and its grid.

The accountants are those of dp_accounting. They compute in floating point, so that
their results have rounding errors. A bound on these errors is charged to delta or
epsilon.
"""

import functools
import math
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import dp_accounting
import numpy as np
from dp_accounting import pld, rdp
from scipy import special

from dpmp import _validate
from dpmp.accounting._allocation import ROUNDING, epoch_loss_distribution
from dpmp.accounting._events import (
    DEFAULT_RELATION,
    RandomAllocationDpEvent,
    Step,
    check_delta,
    check_relation,
    steps_of,
)
from dpmp.accounting._rounding import digits_above, round_up

_Relation = dp_accounting.NeighboringRelation
_Bound: TypeAlias = tuple[float, str]  # epsilon, and the accountant in words

# The largest number of grid points for one step, and for all steps. These limits keep
# an analysis within a few seconds and 0.5 GB.
_STEP_POINTS, _TOTAL_POINTS = 1e5, 6e5
# An interval of a step's standard deviation / 80 moves epsilon by 1e-5 of itself, and
# one of a 13th by 4e-4. A step of little loss makes do with the latter: with more
# points than dp_accounting takes by default, its analysis would take twice as long.
_MOST_POINTS, _FEWEST_POINTS, _DEFAULT_INTERVAL = 80, 13, 1e-4
# An interval above 100 is needed for epsilons above 1e4, where Renyi DP is as good.
_LARGEST_INTERVAL = 100.0
# A relative margin for the last roundings of a result.
_MARGIN = 1e-6
# Below 3.5, only integers are used: for other orders, the series may not converge.
_RDP_ORDERS = (2, 3, *np.arange(3.5, 11, 0.1), *range(11, 64), 96, 128, 256, 512, 1024)


class Run(NamedTuple):
    """All steps of a run, and the neighbouring relation to account for."""

    steps: tuple[Step, ...]
    relation: _Relation

    @property
    def num_steps(self) -> int:
        return sum(step.times for step in self.steps)

    @property
    def event(self) -> dp_accounting.DpEvent:
        parts: list[Any] = [
            dp_accounting.SelfComposedDpEvent(s.event, s.times) for s in self.steps
        ]
        return dp_accounting.ComposedDpEvent(parts)


@dataclass(frozen=True)
class PrivacyGuarantee:
    """States that a run is (epsilon, delta)-differentially private.

    >>> print(PrivacyGuarantee(2.9999, 1e-5, "Renyi DP", "REPLACE_SPECIAL"))
    epsilon 3.000 at delta 1e-05

    Attributes:
      epsilon: an upper bound, which may be infinite.
      delta: the delta for which epsilon was computed.
      accountant: the method that computed epsilon, in words.
      neighboring_relation: the name of the relation in dp_accounting.
    """

    epsilon: float
    delta: float
    accountant: str
    neighboring_relation: str

    def __post_init__(self):
        _validate.fields(self, epsilon=_validate.real, delta=_validate.real)

    def __str__(self) -> str:
        delta = digits_above(self.delta, 3)
        return f"epsilon {round_up(self.epsilon)} at delta {delta}"


def get_epsilon(
    event: dp_accounting.DpEvent,
    *,
    delta: float,
    neighboring_relation: _Relation = DEFAULT_RELATION,
) -> PrivacyGuarantee:
    """An upper bound on the epsilon of an event; tight if a tight bound is known.

    >>> guarantee = get_epsilon(dpsgd_event(1.0, 1000, sampling_prob=0.01), delta=1e-6)
    >>> print(f"{guarantee.epsilon:.3f} by {guarantee.accountant}")
    2.125 by privacy loss distributions

    Guarantees:
      The returned epsilon is an upper bound in spite of rounding errors. With privacy
      loss distributions (PLD), rounding can amount to about 1e-15 per step, or to 1e-14
      for small noise multipliers, and this is subtracted from delta first. If delta is
      too small for that, Renyi DP (RDP) is used. Large privacy losses are computed on a
      coarse grid, which limits time and memory and can only raise epsilon. Without
      noise epsilon is infinite. Without steps it is 0.

    Args:
      event: Gaussian steps, which may be sampled, truncated and composed.
      delta: a probability; choose it well below 1 over the number of examples.
      neighboring_relation: which two datasets are neighbours; see `dpmp.accounting`.

    Raises:
      TypeError: if `event` is not an event, or `neighboring_relation` not a relation.
      ValueError: for other mechanisms, if delta is outside of (0, 1), or if no
        accountant has an answer. RDP has none for `REPLACE_ONE`, nor for truncation
        that is not very rare.

    References:
      PLD: [Doroshenko et al., 2022](https://arxiv.org/abs/2207.04380). RDP: [Mironov et
      al., 2019](https://arxiv.org/abs/1908.10530). Without sampling: [Balle and Wang,
      2018](https://arxiv.org/abs/1805.06530).
    """
    delta = check_delta(delta)
    check_relation(neighboring_relation)
    epsilon, accountant = bound(Run(steps_of(event), neighboring_relation), delta)
    if not accountant:
        relations = dp_accounting.NeighboringRelation
        fix = "Raise them. Larger truncated batches help"
        if neighboring_relation is relations.REPLACE_ONE:
            fix += ", and so do other relations, which RDP can analyse"
        multipliers = {x.noise_multiplier for x in steps_of(event)}
        _validate.fail(
            "noise and delta must be large enough for an accountant",
            fix=f"{fix}.",
            noise_multipliers=sorted(multipliers),
            delta=delta,
            neighboring_relation=neighboring_relation.name,
        )
    return PrivacyGuarantee(epsilon, delta, accountant, neighboring_relation.name)


def bound(run: Run, delta: float) -> _Bound:
    """Returns epsilon and its accountant, by the tightest method with an answer."""
    if not run.steps:
        return 0.0, "nothing is released"
    if any(step.noise_multiplier == 0 for step in run.steps):
        return math.inf, "no noise, no privacy"
    for method in _METHODS:
        # For very little noise, dp_accounting overflows.
        try:
            with np.errstate(all="ignore"):
                epsilon, accountant = method(run, delta)
        except (ArithmeticError, ValueError):
            continue
        if math.isfinite(epsilon):
            return float(epsilon), accountant
    return _NO_ANSWER


def _gaussian_bound(run: Run, delta: float) -> _Bound:
    """Epsilon without sampling, where all steps compose to one Gaussian mechanism."""
    if any(step.sampling_prob < 1 or step.truncation for step in run.steps):
        return _NO_ANSWER
    signal = math.hypot(*(s.times**0.5 / s.noise_multiplier for s in run.steps))
    if run.relation is _Relation.REPLACE_ONE:
        signal *= 2
    epsilon = dp_accounting.get_epsilon_gaussian(
        1 / signal, delta * (1 - _MARGIN), tol=1e-15
    )
    return epsilon, "exact Gaussian mechanism"


class _PLDAccountant(pld.PLDAccountant):
    """Composes epochs of random allocation, too."""

    def _maybe_compose(self, event: Any, count: int, do_compose: bool) -> Any:
        if not isinstance(event, RandomAllocationDpEvent):
            return super()._maybe_compose(event, count, do_compose)
        if do_compose:
            epoch = epoch_loss_distribution(
                event.noise_multiplier, event.steps, self._value_discretization_interval
            )
            self._pld = self._pld.compose(epoch.self_compose(count))
        return None


def _pld_bound(run: Run, delta: float) -> _Bound:
    allocated = [step for step in run.steps if step.allocated_event]
    if any(step.truncation for step in allocated):
        return _NO_ANSWER
    if not (allocated and run.relation is _Relation.REPLACE_ONE):
        return _pld_epsilon(run, delta), "privacy loss distributions"
    # Padding replaces the example, and then the other example the padding. If one is
    # (e, d)-DP and the other (e', d'), both are (e + e', d + exp(e) d')-DP together.
    run = run._replace(relation=_Relation.REPLACE_SPECIAL)
    first = _pld_epsilon(run, delta / 2)
    second = _pld_epsilon(run, delta / 2 * math.exp(-first))
    return first + second, "privacy loss distributions, for two replacements"


def _pld_epsilon(run: Run, delta: float) -> float:
    interval, rounding = _grid(run)
    if interval > _LARGEST_INTERVAL or rounding > delta / 2:
        return math.inf
    accountant = _composed(run, interval)
    delta -= rounding
    epsilon = accountant.get_epsilon(delta * (1 - _MARGIN)) * (1 + _MARGIN)
    if epsilon > 600 and accountant.get_delta(800) <= delta:
        # get_epsilon sums exp(-loss), which is subnormal for losses from 708 on and 0
        # from 745 on. get_delta does not have this problem.
        search = pld.common.BinarySearchParameters(0, 800, tolerance=1e-3)
        get_delta = accountant.get_delta
        found = pld.common.inverse_monotone_function(get_delta, delta, search)
        epsilon = math.inf if found is None else found
    return epsilon if accountant.get_delta(epsilon) <= delta else math.inf


# Composition takes long, and epsilon is asked for many deltas of one run.
@functools.lru_cache(maxsize=4)
def _composed(run: Run, interval: float) -> _PLDAccountant:
    return _PLDAccountant(run.relation, interval).compose(run.event)


def _rdp_bound(run: Run, delta: float) -> _Bound:
    accountant = rdp.RdpAccountant(_RDP_ORDERS, run.relation)
    if not accountant.supports(run.event):
        return _NO_ANSWER
    accountant.compose(run.event)
    # dp_accounting cuts its series at 1e-13. Rounding can make a tiny divergence
    # negative, and overflow makes a divergence NaN. dp_accounting would take both for
    # no loss at all.
    rounding = 1e-12 * run.num_steps
    divergences = np.nan_to_num(
        accountant.rdp * (1 + 1e-12) + rounding, nan=math.inf, posinf=math.inf
    )
    epsilon, _ = rdp.compute_epsilon(_RDP_ORDERS, divergences.tolist(), delta)
    return epsilon, "Renyi differential privacy"


def _untruncated_bound(run: Run, delta: float, *, share: float) -> _Bound:
    """Charges truncation to a share of delta: docs/proofs.md shows its price."""
    tail = math.fsum(step.times * step.truncation for step in run.steps)
    if not 0 < 2 * tail <= delta * share:
        return _NO_ANSWER
    plain = tuple(s._replace(truncated_event=None, truncation=0.0) for s in run.steps)
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
    """Returns the interval of the grid, and a bound on the rounding error of delta."""
    width = max(_loss_scale(step, run.relation)[0] for step in run.steps)
    moment = total_moment(run)
    stddev = math.sqrt(moment / run.num_steps)
    # dp_accounting cuts the sum of all losses by the Chernoff bounds of these orders.
    span = min(70 * width / k + k * moment / width for k in range(1, 21))
    interval = max(
        stddev / _MOST_POINTS,
        min(stddev / _FEWEST_POINTS, _DEFAULT_INTERVAL),
        width / _STEP_POINTS,
        min(span, run.num_steps * width) / _TOTAL_POINTS,
        # dp_accounting computes probabilities as second differences of deltas over the
        # interval. With a smaller interval, the rounding of the deltas would dominate.
        math.sqrt(1e-13 * run.num_steps * stddev),
    )
    # A delta of one step is the difference of two numbers in [0, 1], and one of these
    # is exp of terms as large as the losses. If all deltas are wrong by at most r, then
    # the computed step with an extra atom of r at infinity dominates the true step.
    # These atoms add up over the steps, and so do the roundings of the power of the
    # Fourier transform. In comparison with exact values, the error was below 5e-17 per
    # step.
    rounding = sys.float_info.epsilon * (4 + width) * run.num_steps
    rounding += ROUNDING * sum(s.times for s in run.steps if s.allocated_event)
    return interval, rounding


def total_moment(run: Run) -> float:
    return math.fsum(s.times * _loss_scale(s, run.relation)[1] for s in run.steps)


def _loss_scale(step: Step, relation: _Relation) -> tuple[float, float]:
    """The range and second moment of the privacy loss of a step, to choose a grid."""
    width, moment = _sampled_loss_scale(step.noise_multiplier, step.sampling_prob)
    if step.allocated_event:
        _, of_one = _sampled_loss_scale(step.noise_multiplier, 1.0)
        moment = min(moment * step.allocated_event.steps, of_one)
    if relation is _Relation.REPLACE_ONE:
        width, moment = 2 * width, 4 * moment
    if step.truncation:
        # dp_accounting adds the case that truncation replaces one example by another.
        wide, more = _sampled_loss_scale(step.noise_multiplier / 2, step.sampling_prob)
        width = max(width, 2 * wide)
        moment += 4 * more * min(1.0, step.truncation / step.sampling_prob)
    return width, moment


def _sampled_loss_scale(noise: float, prob: float) -> tuple[float, float]:
    noise = max(noise, 1e-9)  # avoids an overflow below; the exact range hardly matters
    precision = noise**-2
    reach = precision / 2 + 10.5 / noise  # dp_accounting cuts noise off at exp(-50)
    rest, sampled = special.log1p(-prob), math.log(prob)
    low, high = np.logaddexp(rest, [sampled - reach, sampled + reach])
    moment = min(
        prob**2 * special.expm1(precision),
        prob * (precision**2 / 4 + precision) + prob**2,
    )
    return float(high - low), float(moment)
