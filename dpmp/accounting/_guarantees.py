"""Epsilon of an event, and the noise that a target epsilon needs."""

from collections.abc import Callable
from dataclasses import dataclass

import dp_accounting

from dpmp import _validate
from dpmp._numbers import as_real
from dpmp.accounting import _calibration, _epsilon
from dpmp.accounting._relation import DEFAULT_RELATION as DEFAULT_RELATION
from dpmp.accounting._relation import check_relation as check_relation

_Relation = dp_accounting.NeighboringRelation


@dataclass(frozen=True)
class PrivacyGuarantee:
    """A run is (epsilon, delta)-DP; epsilon may be infinite.

    Attributes:
      epsilon: an upper bound.
      delta: the one asked for.
      accountant: where epsilon comes from, in words.
      neighboring_relation: the name of dp_accounting's relation.
    """

    epsilon: float
    delta: float
    accountant: str
    neighboring_relation: str

    def __post_init__(self):
        for name in ("epsilon", "delta"):
            object.__setattr__(self, name, as_real(getattr(self, name)))


def get_epsilon(
    event: dp_accounting.DpEvent,
    *,
    delta: float,
    neighboring_relation: _Relation = DEFAULT_RELATION,
) -> PrivacyGuarantee:
    """An upper bound on the epsilon of an event, tight wherever that can be computed.

    >>> guarantee = get_epsilon(dpsgd_event(1.0, 1000, sampling_prob=0.01), delta=1e-6)
    >>> print(f"{guarantee.epsilon:.3f} by {guarantee.accountant}")
    2.125 by privacy loss distributions

    Guarantees:
      The number returned is a bound, in spite of rounding errors: what these can amount
      to, for privacy loss distributions (PLD) about 1e-15 per step, is taken from delta
      first, and where delta is smaller, Renyi DP (RDP) takes over. Large losses get a
      coarse grid, which bounds time and memory and can only raise epsilon. Without
      noise epsilon is infinite; without steps it is 0.

    Args:
      event: Gaussian steps, sampled, truncated and composed.
      delta: well below 1 over the number of examples.
      neighboring_relation: which datasets are neighbours; see `dpsgd_event`.

    Returns:
      Epsilon and how it was found.

    Raises:
      TypeError: for something that is not an event or not a relation.
      ValueError: for other mechanisms, for a delta outside of (0, 1), and where no
        accountant has an answer. RDP has none for `REPLACE_ONE` and for truncation that
        is not very rare.

    References:
      PLD: [Doroshenko et al., 2022](https://arxiv.org/abs/2207.04380). RDP: [Mironov et
      al., 2019](https://arxiv.org/abs/1908.10530). Without sampling: [Balle and Wang,
      2018](https://arxiv.org/abs/1805.06530).
    """
    delta = check_delta(delta)
    check_relation(neighboring_relation)
    epsilon, accountant = _epsilon.bound(
        _epsilon.Run(_epsilon.steps_of(event), neighboring_relation), delta
    )
    _validate.require(
        bool(accountant),
        "noise and delta must be large enough for an accountant",
        delta=delta,
        neighboring_relation=neighboring_relation.name,
        fix="Raise them. Larger truncated batches help; so do relations other than "
        "REPLACE_ONE, which RDP cannot analyse.",
    )
    return PrivacyGuarantee(epsilon, delta, accountant, neighboring_relation.name)


def calibrate_noise_multiplier(
    make_event: Callable[[float], dp_accounting.DpEvent],
    *,
    epsilon: float,
    delta: float,
    neighboring_relation: _Relation = DEFAULT_RELATION,
) -> float:
    """The smallest noise multiplier that meets a target.

    >>> import functools
    >>> make_event = functools.partial(dpsgd_event, iterations=1000, sampling_prob=0.01)
    >>> print(f"{calibrate_noise_multiplier(make_event, epsilon=2.0, delta=1e-6):.3f}")
    1.029

    Args:
      make_event: from a noise multiplier to an event, more private for more noise.
      epsilon: the target.
      delta: as in `get_epsilon`.
      neighboring_relation: as in `get_epsilon`.

    Returns:
      A value that `get_epsilon` confirms, at most 1e-4 of itself above the smallest
      such value; about 1e-4 where even that little noise is enough.

    Raises:
      TypeError: for a `make_event` that is not such a function.
      ValueError: for a target that is out of range or needs more noise than 1e9.
    """
    _validate.require(
        callable(make_event),
        "make_event must be a function of the noise multiplier",
        make_event=make_event,
        fix="Use functools.partial(dpsgd_event, iterations=..., sampling_prob=...).",
        error=TypeError,
    )
    epsilon = _validate.positive(epsilon=epsilon, fix="Use 8, for example.")
    delta = check_delta(delta)
    check_relation(neighboring_relation)

    def make_run(noise_multiplier: float) -> _epsilon.Run:
        return _epsilon.Run(
            _epsilon.steps_of(make_event(noise_multiplier)), neighboring_relation
        )

    noise_multiplier = _calibration.least_noise_multiplier(
        make_run, epsilon=epsilon, delta=delta
    )
    if noise_multiplier is None:
        _validate.fail(
            "the target must be within reach of a noise multiplier of 1e9",
            epsilon=epsilon,
            delta=delta,
            fix="Raise it; get_epsilon(make_event(1e9)) tells what stands in the way.",
        )
    return noise_multiplier


def check_delta(delta: float) -> float:
    """`delta` as a `float`; raises ValueError unless it is in (0, 1)."""
    value = as_real(delta)
    _validate.require(
        _validate.is_real(value) and 0 < value < 1,
        "delta must be in (0, 1)",
        delta=delta,
        fix="Use a value well below 1 / num_examples.",
    )
    return value
