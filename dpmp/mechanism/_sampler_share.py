"""Epsilon of noise that a computer draws: a share of delta is left for the sampler.

No entry of the noise is quite ideal (`noise_addition/_discrete_gaussian.py`), and a
total variation distance of t takes (1 + exp(epsilon)) t of delta. Where the share
does not cover that, nothing is claimed.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import dp_accounting

from dpmp import _validate, accounting
from dpmp.noise_addition._discrete_gaussian import LARGEST_TOTAL_VARIATION

_SHARE = 1e-4


@functools.lru_cache(maxsize=1024)
def get_epsilon(
    event: dp_accounting.DpEvent,
    *,
    delta: float,
    num_entries: int,
    neighboring_relation: dp_accounting.NeighboringRelation,
) -> accounting.PrivacyGuarantee:
    """As in `accounting`, for an event with `num_entries` entries of noise."""
    delta = accounting.check_delta(delta)  # before the share is taken from it
    guarantee = accounting.get_epsilon(
        event,
        delta=delta * (1 - _SHARE),
        neighboring_relation=neighboring_relation,
    )
    is_covered = guarantee.epsilon <= _largest_epsilon(delta, num_entries)
    epsilon = guarantee.epsilon if is_covered else math.inf
    return dataclasses.replace(guarantee, epsilon=epsilon, delta=delta)


def calibrate_noise_multiplier(
    make_event: Callable[[float], dp_accounting.DpEvent],
    *,
    epsilon: float,
    delta: float,
    num_entries: int,
    neighboring_relation: dp_accounting.NeighboringRelation,
) -> float:
    """As in `accounting`, for events with `num_entries` entries of noise."""
    epsilon = _validate.positive(epsilon=epsilon, fix="Use 8, for example.")
    delta = accounting.check_delta(delta)
    largest = _largest_epsilon(delta, num_entries)
    _validate.require(
        epsilon <= largest,
        f"epsilon must be at most {largest:.4g}, beyond which the sampler of the "
        f"noise, not its width, limits the claim",
        epsilon=epsilon,
        fix="So large an epsilon is hardly a claim; without_privacy() makes none.",
    )
    return accounting.calibrate_noise_multiplier(
        make_event,
        epsilon=epsilon,
        delta=delta * (1 - _SHARE),
        neighboring_relation=neighboring_relation,
    )


def _largest_epsilon(delta: float, num_entries: int) -> float:
    """Up to which the noise may pass for ideal."""
    share = _SHARE * delta / (num_entries * LARGEST_TOTAL_VARIATION)
    return math.log(share - 1) if share > 1 else -math.inf
