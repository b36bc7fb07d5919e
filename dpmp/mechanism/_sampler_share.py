"""Charges a share of delta for the sampler's deviation from ideal Gaussian noise.

Each entry of the noise deviates slightly from an ideal discrete Gaussian
(`noise_addition/_discrete_gaussian.py`). If the total variation distances of all
entries add up to t, they use up (1 + exp(epsilon)) t of delta. If the share does not
cover this, no finite epsilon is claimed.
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
    """Like the function of `accounting`, for `num_entries` entries of noise."""
    delta = accounting.check_delta(delta)  # so that the message shows the given delta
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
    """Like the function of `accounting`, for `num_entries` entries of noise."""
    epsilon = _validate.positive(epsilon=epsilon, fix="Use 8, for example.")
    delta = accounting.check_delta(delta)
    largest = _largest_epsilon(delta, num_entries)
    _validate.require(
        epsilon <= largest,
        f"epsilon must be at most {largest:.4g}: above that, the sampler of the noise "
        f"limits epsilon, and not the width of the noise",
        epsilon=epsilon,
        fix="Use a smaller epsilon, since such a large one protects hardly anything. "
        "Or use without_privacy(), which claims no epsilon.",
    )
    return accounting.calibrate_noise_multiplier(
        make_event,
        epsilon=epsilon,
        delta=delta * (1 - _SHARE),
        neighboring_relation=neighboring_relation,
    )


def _largest_epsilon(delta: float, num_entries: int) -> float:
    """The largest epsilon for which the share covers the sampler's deviation."""
    share = _SHARE * delta / (num_entries * LARGEST_TOTAL_VARIATION)
    return math.log(share - 1) if share > 1 else -math.inf
