"""What a run of DP-SGD costs in privacy, and how much noise a target needs.

The analysis is dp_accounting's; `accounting/_epsilon.py` says which accountant is asked. Datasets
are neighbours if one example is blanked out (REPLACE_SPECIAL), here and everywhere in
dpmp, unless another `neighboring_relation` is given.
"""

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import dp_accounting
from scipy import stats

from dpmp import _validate
from dpmp._numbers import as_real
from dpmp.accounting import _calibration, _epsilon
from dpmp.accounting._relation import DEFAULT_RELATION as DEFAULT_RELATION
from dpmp.accounting._relation import check_relation as check_relation
from dpmp.accounting._rounding import round_up as round_up

_Relation = dp_accounting.NeighboringRelation

_CHECKS = {
    "noise_multiplier": (_validate.nonnegative, "Use calibrate_noise_multiplier."),
    "sampling_prob": (
        _validate.probability,
        "Use expected_batch_size / num_examples.",
    ),
    "num_examples": (_validate.positive_integer, "Count the examples to train on."),
    "truncated_batch_size": (
        _validate.positive_integer,
        "Use choose_truncated_batch_size.",
    ),
    "multiple_of": (_validate.positive_integer, "Use the microbatch size, or 1."),
}


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


def dpsgd_event(
    noise_multiplier: float, iterations: int, *, sampling_prob: float
) -> dp_accounting.DpEvent:
    """The event of DP-SGD on Poisson-sampled batches.

    `noise_multiplier` is the standard deviation of the noise over the largest
    contribution of one example, whatever the neighbouring relation: that replacing an
    example moves the sum twice as far is left to the accountant.

    >>> dpsgd_event(1.0, 1000, sampling_prob=0.01).count
    1000

    Args:
      noise_multiplier: 0 for an event that is not private.
      iterations: the number of steps; 0 for an event that costs nothing.
      sampling_prob: the probability that an example is in a batch.

    Returns:
      An event for `get_epsilon` or any accountant of dp_accounting.

    Raises:
      ValueError: for an argument that is out of range.

    References:
      [Abadi et al., 2016](https://arxiv.org/abs/1607.00133)
    """
    noise_multiplier, sampling_prob = _check(
        noise_multiplier=noise_multiplier, sampling_prob=sampling_prob
    )
    step = _epsilon.sampled_gaussian(noise_multiplier, sampling_prob)
    return _repeat(step, noise_multiplier, iterations)


def truncated_dpsgd_event(
    noise_multiplier: float,
    iterations: int,
    *,
    sampling_prob: float,
    num_examples: int,
    truncated_batch_size: int,
) -> dp_accounting.DpEvent:
    """As `dpsgd_event`, where batches above a limit lose random examples.

    >>> event = truncated_dpsgd_event(
    ...     1.0, 1000, sampling_prob=0.01, num_examples=6000, truncated_batch_size=150
    ... )
    >>> round(get_epsilon(event, delta=1e-6).epsilon, 2)
    2.12

    Args:
      noise_multiplier: as in `dpsgd_event`.
      iterations: as in `dpsgd_event`.
      sampling_prob: the probability that an example is drawn.
      num_examples: the size of the larger of two neighbouring datasets. Under
        ADD_OR_REMOVE_ONE a dataset has larger and smaller neighbours: what it costs is
        the worse of this event for its size and for one more.
      truncated_batch_size: the largest batch.

    Returns:
      An event for `get_epsilon` or dp_accounting's `PLDAccountant`.

    Raises:
      ValueError: for an argument that is out of range.

    References:
      [Ganesh, 2025](https://arxiv.org/abs/2508.15089)
    """
    noise_multiplier, sampling_prob = _check(
        noise_multiplier=noise_multiplier, sampling_prob=sampling_prob
    )
    num_examples, truncated_batch_size = _check(
        num_examples=num_examples, truncated_batch_size=truncated_batch_size
    )
    step = dp_accounting.TruncatedSubsampledGaussianDpEvent(
        dataset_size=num_examples,
        sampling_probability=sampling_prob,
        truncated_batch_size=truncated_batch_size,
        noise_multiplier=noise_multiplier,
    )
    return _repeat(step, noise_multiplier, iterations)


def truncation_probability(
    num_examples: int, sampling_prob: float, truncated_batch_size: int
) -> float:
    """P[Binomial(num_examples, sampling_prob) > truncated_batch_size].

    >>> print(f"{truncation_probability(6000, 0.01, 150):.2g}")
    2.6e-23

    Args:
      num_examples: the size of the dataset.
      sampling_prob: the probability that an example is drawn.
      truncated_batch_size: the largest batch.

    Returns:
      The probability to eleven digits, down to 1e-300.

    Raises:
      ValueError: for an argument that is out of range.
    """
    num_examples, sampling_prob, truncated_batch_size = _check(
        num_examples=num_examples,
        sampling_prob=sampling_prob,
        truncated_batch_size=truncated_batch_size,
    )
    return float(stats.binom.sf(truncated_batch_size, num_examples, sampling_prob))


def choose_truncated_batch_size(
    num_examples: int, sampling_prob: float, *, multiple_of: int = 1
) -> int:
    """The smallest batch size exceeded with a probability of at most 1e-20.

    That changes epsilon by less than anyone prints, and spares `get_epsilon` the much
    wider losses of truncated batches.

    >>> choose_truncated_batch_size(6000, 0.01, multiple_of=16)
    144

    Args:
      num_examples: the size of the dataset.
      sampling_prob: the probability that an example is drawn.
      multiple_of: what the size should be a multiple of.

    Returns:
      At most `num_examples`, rounded up to a multiple.

    Raises:
      ValueError: for an argument that is out of range.
    """
    num_examples, multiple_of = _check(
        num_examples=num_examples, multiple_of=multiple_of
    )

    def is_rare(size: int) -> bool:
        return truncation_probability(num_examples, sampling_prob, size) <= 1e-20

    sizes = range(multiple_of, num_examples + multiple_of, multiple_of)
    return int(sizes[bisect.bisect_left(sizes, True, key=is_rare)])


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


def _repeat(
    step: dp_accounting.DpEvent, noise_multiplier: float, iterations: int
) -> dp_accounting.DpEvent:
    iterations = _validate.nonnegative_integer(
        iterations=iterations, fix="Use the number of updates."
    )
    if iterations == 0:
        return dp_accounting.NoOpDpEvent()
    if noise_multiplier == 0:
        return dp_accounting.NonPrivateDpEvent()
    return dp_accounting.SelfComposedDpEvent(step, iterations)


def _check(**values: Any) -> list[Any]:
    """The values as Python numbers; raises ValueError for one out of range."""
    return [
        _CHECKS[name][0](**{name: x}, fix=_CHECKS[name][1])
        for name, x in values.items()
    ]
