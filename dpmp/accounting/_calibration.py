"""Searches for the least noise that meets a privacy target."""

import functools
import math
from collections.abc import Callable

import dp_accounting
import numpy as np
from dp_accounting import pld
from scipy import optimize

from dpmp import _validate
from dpmp.accounting import _epsilon
from dpmp.accounting._epsilon import Run
from dpmp.accounting._events import DEFAULT_RELATION, check, check_relation, steps_of

_LOG_NOISE_RANGE, _LOG_NOISE_TOLERANCE = (-9.0, 21.0), 5e-5


def calibrate_noise_multiplier(
    make_event: Callable[[float], dp_accounting.DpEvent],
    *,
    epsilon: float,
    delta: float,
    neighboring_relation: dp_accounting.NeighboringRelation = DEFAULT_RELATION,
) -> float:
    """The smallest noise multiplier that meets a privacy target.

    >>> import functools
    >>> make_event = functools.partial(dpsgd_event, iterations=1000, sampling_prob=0.01)
    >>> print(f"{calibrate_noise_multiplier(make_event, epsilon=2.0, delta=1e-6):.3f}")
    1.029

    Args:
      make_event: a function from a noise multiplier to an event. More noise must make
        the event more private.
      epsilon: the target epsilon.
      delta: see `get_epsilon`.
      neighboring_relation: see `get_epsilon`.

    Returns:
      A noise multiplier for which `get_epsilon` is at most the target. It is at most
      1e-4 of itself above the smallest one. Noise multipliers below about 1e-4 are not
      tried.

    Raises:
      TypeError: if `make_event` is not a function from a noise multiplier to an event.
      ValueError: if the target is out of range or needs a noise multiplier above 1e9.
    """
    if not callable(make_event):
        _validate.fail(
            "make_event must be a function of the noise multiplier. Use "
            "functools.partial(dpsgd_event, iterations=..., sampling_prob=...).",
            make_event=make_event,
            error=TypeError,
        )
    epsilon, delta = check(epsilon=epsilon, delta=delta)
    check_relation(neighboring_relation)

    def make_run(noise_multiplier: float) -> Run:
        return Run(steps_of(make_event(noise_multiplier)), neighboring_relation)

    return least_noise_multiplier(
        lambda noise_multiplier: _epsilon.bound(make_run(noise_multiplier), delta)[0],
        epsilon=epsilon,
        delta=delta,
        guess=math.exp(_guess_log_noise(make_run, epsilon, delta)),
    )


def least_noise_multiplier(
    epsilon_of: Callable[[float], float], *, epsilon: float, delta: float, guess: float
) -> float:
    """The smallest noise multiplier for which `epsilon_of` is at most `epsilon`.

    It does for other events what `calibrate_noise_multiplier` does for Gaussian steps.

    Args:
      epsilon_of: computes epsilon of a noise multiplier. It must be a falling function.
      epsilon: the target epsilon.
      delta: the delta for which `epsilon_of` computes epsilon.
      guess: the noise multiplier from which the search starts.

    Raises:
      ValueError: if the target needs a noise multiplier above 1e9.
    """
    guess, confirmed = _validate.positive(guess=guess), []

    @functools.cache
    def excess(log_noise: float) -> float:
        ratio = epsilon_of(math.exp(log_noise)) / epsilon
        if ratio <= 1:
            confirmed.append(log_noise)
        return math.log(min(max(ratio, 0.1), 10.0))  # infinities would stop the search

    # The search of dp_accounting has no relative tolerance and fails on infinities.
    _bracket_root(excess, math.log(guess))
    if not confirmed:
        _validate.fail(
            "the target must be within reach of a noise multiplier of 1e9. Raise "
            "epsilon or delta. The epsilon of 1e9 tells what stands in the way.",
            epsilon=epsilon,
            delta=delta,
        )
    return math.exp(min(confirmed))


def _guess_log_noise(
    make_run: Callable[[float], Run], epsilon: float, delta: float
) -> float:
    """Guesses the solution as if the run were one Gaussian mechanism."""
    with np.errstate(all="ignore"):
        signal = 1 / dp_accounting.get_sigma_gaussian(epsilon, delta)
    guess = pld.common.inverse_monotone_function(
        lambda log_noise: _epsilon.total_moment(make_run(math.exp(log_noise))),
        signal * signal,
        pld.common.BinarySearchParameters(*_LOG_NOISE_RANGE, tolerance=0.01),
    )
    return _LOG_NOISE_RANGE[1] if guess is None else guess


def _bracket_root(excess: Callable[[float], float], start: float) -> None:
    """Evaluates a falling function close to its zero, on both sides."""
    low = high = start
    stride = 0.1
    while excess(high) > 0 and high < _LOG_NOISE_RANGE[1]:
        low, high = high, min(high + stride, _LOG_NOISE_RANGE[1])
        stride *= 3
    while excess(low) <= 0 and low > _LOG_NOISE_RANGE[0]:
        low, high = max(low - stride, _LOG_NOISE_RANGE[0]), low
        stride *= 3
    if excess(high) <= 0 < excess(low):
        optimize.brentq(excess, low, high, xtol=_LOG_NOISE_TOLERANCE)
