"""Audits a finished model by its losses on canary records, after one training run.

The attacker sees no gradient, only losses of the finished model. A *canary* is a record
that was made up for the audit. A fair coin decides whether it is in the training data.
The attacker knows all canaries, and guesses from the losses which of them are in.

Why the bound on epsilon is valid: let the model be private in each coin, with delta 0.
By Bayes' rule, a guess is right with probability at most q = exp(epsilon) / (1 +
exp(epsilon)), whatever the model and the other coins are. So of r guesses, made in any
order, the number of right ones is at most that of r tosses of a coin with probability
q, in distribution. This holds however much canaries influence each other. A
Clopper-Pearson bound would need independent trials, and such canaries are not. A delta
above zero adds a term, which `_p_value` has.

jax_privacy has this bound too. It would be a second library of private training to
install, for a formula of five lines.

References:
  [Steinke et al.: Privacy auditing with one (1) training
  run](https://arxiv.org/abs/2305.08846); [Carlini et al.: The secret
  sharer](https://arxiv.org/abs/1802.08232); [Carlini et al.: Membership inference
  attacks from first principles](https://arxiv.org/abs/2112.03570)
"""

import dataclasses
import functools
import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, special, stats

from dpmp import _plain_text, _validate

_FEWEST = 32

# Fair coins are refused once in a million audits.
_UNFAIR = 1e-6

_FALSE_POSITIVES = 0.01

# Which shares of the canaries an attacker guesses: those that seem most to be in the
# data, and those that seem least. The first pair is best if all are memorized, the
# second one if all are a little, and the third one if a few are.
_GUESSED = (0.5, 0.5), (0.125, 0.125), (0.125, 0.0)

_LARGEST_EPSILON = 60.0


@dataclasses.dataclass(frozen=True)
class MemorizationAudit:
    """What the losses of a model tell about its training data; `str` describes it.

    Attributes:
      epsilon: a lower bound on epsilon at `delta`, with the given `confidence`.
      claimed: the epsilon that is claimed; infinite for none.
      delta: the delta of both.
      confidence: the probability that the lower bound is one.
      largest_epsilon: the lower bound if all guesses were right. With so few canaries,
        no larger claim can be contradicted.
      num_canaries: the number of canaries, in the data or not.
      true_positive_rate: the share of the canaries in the data that an attacker finds
        who takes at most 1 % of the others for such.
      exposure: the median exposure of the canaries in the data, in bits. If a canary
        has rank k among itself and all canaries that are not in the data, then its
        exposure is the logarithm of their number, minus that of k. Without
        memorization, this median is close to 1.
      largest_exposure: the exposure of rank 1.
    """

    epsilon: float
    claimed: float
    delta: float
    confidence: float
    largest_epsilon: float
    num_canaries: int
    true_positive_rate: float
    exposure: float
    largest_exposure: float

    @property
    def passed(self) -> bool:
        """Whether the attacker did no better than the claim allows."""
        return self.epsilon <= self.claimed

    def __str__(self) -> str:
        verdict = "is not contradicted" if self.passed else "is FALSE"
        verdict = f" The claim of {self.claimed:.3f} {verdict}."
        if self.claimed == math.inf:
            verdict = " No claim was tested: pass claimed=."
        elif self.claimed > self.largest_epsilon:
            verdict = f" So few canaries prove {self.largest_epsilon:.3f} at most."
        if self.exposure < 0.5:  # half of what blind guesses have
            verdict += (
                " This attack is worse than blind guesses: the losses of records that "
                "were trained on should be smaller. Are these likelihoods?"
            )
        return _plain_text.paragraph(
            f"{self.num_canaries} canaries: an attacker who sees losses of the model "
            f"finds {self.true_positive_rate:.1%} of those in the data, and takes at "
            f"most {_FALSE_POSITIVES:.0%} of the others for such. The median exposure "
            f"is {self.exposure:.2f} of {self.largest_exposure:.2f} bits (blind "
            f"guesses: 1). So epsilon is at least {self.epsilon:.3f} at delta "
            f"{self.delta:g}, with confidence {self.confidence:.0%}.{verdict}"
        )


def memorization(
    losses: ArrayLike,
    is_in: ArrayLike,
    *,
    delta: float,
    claimed: float = math.inf,
    confidence: float = 0.95,
) -> MemorizationAudit:
    """Computes what the losses of a model tell about the records it was trained on.

    The model may come from any library. Make up canaries, records of the kind that it
    must not memorize, and toss a coin for each of them. Train on your records and on
    the canaries whose coin shows heads. Then pass the loss of the model for every
    canary, whether it was in the data or not. If some canaries are much easier than
    others, subtract the losses of a model that was trained without them.

    >>> rng = np.random.default_rng(0)
    >>> is_in = rng.random(400) < 0.5
    >>> losses = rng.normal(loc=np.where(is_in, -4.0, 0.0))
    >>> audit = memorization(losses, is_in, delta=1e-5, claimed=2.0)
    >>> audit.passed
    False

    *Guarantees.* If the coins are fair, independent of each other and of the canaries,
    and if nothing that influences a loss depends on them but the data, then `epsilon`
    is too large with probability at most 1 - `confidence`. So choose nothing after
    looking at `is_in`, and pass all canaries. The bound is far below the claim of most
    runs: an attacker who only sees losses is weak, and m canaries cannot prove more
    than an epsilon of about log(m / 4). A small bound is no evidence of privacy.
    Canaries belong to nobody. For the records that the model was trained on, the result
    is as private as the model.

    Args:
      losses: a number for each canary, (canaries,), which is small if the model fits
        it well.
      is_in: whether each canary is in the data, of the same shape, bool.
      delta: the delta of the bound, at most 1 / (2 * canaries). Without a claim, use
        one that you would claim.
      claimed: the epsilon that the run claims at `delta`, for two datasets that differ
        in one canary.
      confidence: the confidence of the bound.

    Returns:
      The lower bound on epsilon, beside rates and exposure, which have no confidence.

    Raises:
      ValueError: if there are fewer than 32 canaries, if a loss is not finite, if the
        coins cannot be fair, or for an argument out of range.
    """
    losses, is_in = np.asarray(losses, np.float64), np.asarray(is_in)
    _check_canaries(losses, is_in)
    size = len(is_in)
    delta = _validate.nonnegative(delta=delta)
    if not delta <= 0.5 / size:
        _validate.fail(
            "delta must be at most 1 / (2 * canaries). Use the delta of your claim, "
            "or fewer canaries.",
            delta=delta,
            canaries=size,
        )
    confidence = _validate.fraction(confidence=confidence)
    claimed = _validate.real(claimed=claimed)
    if not claimed >= 0:
        _validate.fail(
            "claimed must be an epsilon of at least 0. Leave it out without a claim.",
            claimed=claimed,
        )
    # In random order where losses are the same, so that the order tells no coin.
    order = np.lexsort((np.random.default_rng().random(size), losses))
    ranked = is_in[order]
    true, false = np.cumsum(ranked), np.cumsum(~ranked)
    found = true[false <= _FALSE_POSITIVES * false[-1]]
    exposures = math.log2(false[-1] + 1) - np.log2(false[ranked] + 1)
    level = (1 - confidence) / len(_GUESSED)
    bound = functools.partial(_lower_bound, size, delta=delta, level=level)
    # Which guesses are right, for each way to guess.
    ends = [(int(first * size), size - int(last * size)) for first, last in _GUESSED]
    guesses = [np.concatenate([ranked[:x], ~ranked[y:]]) for x, y in ends]
    return MemorizationAudit(
        epsilon=max(bound(len(x), int(np.sum(x))) for x in guesses),
        claimed=claimed,
        delta=delta,
        confidence=confidence,
        largest_epsilon=max(bound(len(x), len(x)) for x in guesses),
        num_canaries=size,
        true_positive_rate=float(max(found, default=0) / true[-1]),
        exposure=float(np.median(exposures)),
        largest_exposure=math.log2(false[-1] + 1),
    )


def _check_canaries(losses: np.ndarray, is_in: np.ndarray) -> None:
    if is_in.dtype != bool or is_in.ndim != 1 or losses.shape != is_in.shape:
        _validate.fail(
            "losses must be a number for each canary, and is_in a bool. Pass arrays "
            "with one axis. Of 0 and 1, make bools with == 1.",
            losses=losses.shape,
            is_in=(is_in.shape, is_in.dtype.name),
        )
    size = len(is_in)
    if size < _FEWEST:
        _validate.fail(
            f"there must be at least {_FEWEST} canaries. With fewer, an attacker "
            "learns nothing.",
            canaries=size,
        )
    if not np.all(np.isfinite(losses)):
        _validate.fail(
            "losses must be finite. Does the model compute NaN, or has a canary no "
            "token?"
        )
    num_in = int(np.sum(is_in))
    if not float(stats.binomtest(num_in, size).pvalue) > _UNFAIR:
        _validate.fail(
            "is_in must be fair coins. Draw rng.random(canaries) < 0.5 before "
            "training.",
            is_in=f"{num_in} of {size}",
        )


def _lower_bound(
    size: int, guesses: int, right: int, *, delta: float, level: float
) -> float:
    """The least epsilon at which so many right guesses are not too unlikely."""

    def excess(epsilon: float) -> float:
        return _p_value(size, guesses, right, epsilon, delta) - level

    if excess(0.0) >= 0:
        return 0.0
    # The p-value grows with epsilon, up to 1.
    found: Any = optimize.brentq(excess, 0.0, _LARGEST_EPSILON)
    return float(found)


def _p_value(
    size: int, guesses: int, right: int, epsilon: float, delta: float
) -> float:
    """Bounds the probability of so many right guesses about private coins.

    With W binomial, of `guesses` trials with probability exp(epsilon) / (1 +
    exp(epsilon)), the number of right guesses is at most W + F in distribution. F is
    independent of W, and its mean is at most 2 * size * delta (Steinke et al.). At
    worst, F is some i with probability 2 * size * delta / i, and otherwise 0. So the
    bound is a mean of P(W >= right) and P(W >= right - i), and grows with epsilon.
    """
    prob: Any = special.expit(epsilon)
    fewer = np.arange(1, right + 1)
    share = 2 * size * delta / fewer
    tail = float(stats.binom.sf(right - 1, guesses, prob))
    larger = stats.binom.sf(right - 1 - fewer, guesses, prob)
    return float(np.max(tail + share * (larger - tail), initial=tail))
