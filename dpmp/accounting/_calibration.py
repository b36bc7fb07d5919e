"""Searches for the least noise that meets a privacy target."""

import functools
import math
from collections.abc import Callable

import dp_accounting
import numpy as np
from dp_accounting import pld
from scipy import optimize

from dpmp.accounting import _epsilon

_LOG_NOISE_RANGE, _LOG_NOISE_TOLERANCE = (-9.0, 21.0), 5e-5


def least_noise_multiplier(
    make_run: Callable[[float], _epsilon.Run], *, epsilon: float, delta: float
) -> float | None:
    """The least noise multiplier found to meet the target, or None if none does."""
    confirmed = []

    @functools.cache
    def excess(log_noise: float) -> float:
        ratio = _epsilon.bound(make_run(math.exp(log_noise)), delta)[0] / epsilon
        if ratio <= 1:
            confirmed.append(log_noise)
        return math.log(min(max(ratio, 0.1), 10.0))  # the search fails on infinities

    _close_in_on_zero(excess, _guess_log_noise(make_run, epsilon, delta))
    return math.exp(min(confirmed)) if confirmed else None


def _guess_log_noise(
    make_run: Callable[[float], _epsilon.Run], epsilon: float, delta: float
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


def _close_in_on_zero(excess: Callable[[float], float], start: float) -> None:
    """Evaluates a falling function close to its zero, on both sides.

    The search of dp_accounting has no relative tolerance and fails on infinities.
    """
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
