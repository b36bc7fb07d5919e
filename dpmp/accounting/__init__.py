"""Computes the privacy cost of a run of DP-SGD, and the noise that a target needs.

The privacy cost is a pair (epsilon, delta): for two neighbouring datasets, the
probability of any outcome differs by at most a factor of exp(epsilon), plus delta.
Describe a run as an event, and compute its epsilon for a given delta:

>>> event = dpsgd_event(1.0, iterations=1000, sampling_prob=0.01)
>>> print(f"{get_epsilon(event, delta=1e-6).epsilon:.3f}")
2.125

`calibrate_noise_multiplier` answers the opposite question. The package dp_accounting
does all analysis and defines the events. By default, here and everywhere in dpmp, two
datasets are neighbours if one example of the first is replaced by padding in the second
(REPLACE_SPECIAL). The argument `neighboring_relation` chooses another definition.
"""

from dpmp.accounting._calibration import (
    calibrate_noise_multiplier,
    least_noise_multiplier,
)
from dpmp.accounting._epsilon import PrivacyGuarantee, get_epsilon
from dpmp.accounting._events import (
    DEFAULT_RELATION,
    check_delta,
    check_relation,
    choose_truncated_batch_size,
    dpsgd_event,
    random_allocation_event,
    required_delta,
    truncated_dpsgd_event,
    truncation_probability,
)
from dpmp.accounting._rounding import digits_above, digits_below, round_up

__all__ = [
    "DEFAULT_RELATION",
    "PrivacyGuarantee",
    "calibrate_noise_multiplier",
    "check_delta",
    "check_relation",
    "choose_truncated_batch_size",
    "digits_above",
    "digits_below",
    "dpsgd_event",
    "get_epsilon",
    "least_noise_multiplier",
    "random_allocation_event",
    "required_delta",
    "round_up",
    "truncated_dpsgd_event",
    "truncation_probability",
]
