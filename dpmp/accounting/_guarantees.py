"""Computes epsilon of an event."""

from dataclasses import dataclass

import dp_accounting

from dpmp import _validate
from dpmp._numbers import as_real
from dpmp.accounting import _epsilon
from dpmp.accounting._checks import DEFAULT_RELATION, check_delta, check_relation

_Relation = dp_accounting.NeighboringRelation


@dataclass(frozen=True)
class PrivacyGuarantee:
    """States that a run is (epsilon, delta)-differentially private.

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
        for name in ("epsilon", "delta"):
            object.__setattr__(self, name, as_real(getattr(self, name)))


def get_epsilon(
    event: dp_accounting.DpEvent,
    *,
    delta: float,
    neighboring_relation: _Relation = DEFAULT_RELATION,
) -> PrivacyGuarantee:
    """An upper bound on the epsilon of an event, tight where a tight one is known.

    >>> guarantee = get_epsilon(dpsgd_event(1.0, 1000, sampling_prob=0.01), delta=1e-6)
    >>> print(f"{guarantee.epsilon:.3f} by {guarantee.accountant}")
    2.125 by privacy loss distributions

    Guarantees:
      The returned epsilon is an upper bound in spite of rounding errors. With privacy
      loss distributions (PLD), rounding can amount to about 1e-15 per step, and this is
      subtracted from delta first. If delta is too small for that, Renyi DP (RDP) is
      used. Large privacy losses are computed on a coarse grid, which limits time and
      memory and can only raise epsilon. Without noise epsilon is infinite. Without
      steps it is 0.

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
    epsilon, accountant = _epsilon.bound(
        _epsilon.Run(_epsilon.steps_of(event), neighboring_relation), delta
    )
    _validate.require(
        bool(accountant),
        "noise and delta must be large enough for an accountant",
        delta=delta,
        neighboring_relation=neighboring_relation.name,
        fix="Raise them. Larger truncated batches help, and so do relations other than "
        "REPLACE_ONE, which RDP cannot analyse.",
    )
    return PrivacyGuarantee(epsilon, delta, accountant, neighboring_relation.name)
