"""Audits the noise and the sampling of a mechanism with canaries, in one run.

A *canary* is an example whose gradient only touches an entry of its own, with the full
clip norm. A coin decides whether it is in the dataset. After the run, an attacker who
has seen every noisy gradient guesses each coin. If the guesses are better than the
claim allows, then the claim is false.

All canaries are trained on together, by `DPTrainer.fit` with the given mechanism. As
they have entries of their own, they count as independent trials: this assumes that the
noise of different entries is independent, which `selfcheck` measures.

References:
  [Steinke et al.: Privacy auditing with one (1) training
  run](https://arxiv.org/abs/2305.08846); [Nasr et al.: Tight auditing of differentially
  private machine learning](https://arxiv.org/abs/2302.07956)
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from scipy import stats

from dpmp import _plain_text, _validate, accounting
from dpmp.clipping import AutomaticClipping
from dpmp.mechanism import DPSGD, PrivacyCost, guarantee_of
from dpmp.precision import Policy
from dpmp.tools.audit._attacker import Attacker, ComputedRows, name_of
from dpmp.training import DPTrainer, TrainingState

# With as many canaries, a bound is 8 to 17 % below a claim of epsilon 1, and closer to
# larger claims.
_NUM_CANARIES = 2**19

_FEWEST, _MOST_RUNS = 1000, 32

_SHARE_TO_LEARN = 10  # of the canaries: one tenth

# The share of canaries whose coins are guessed as "not in the data": the score above
# which the others are tells much about weak and about strong mechanisms.
_QUANTILE = 0.85

# The most noisy entries of all steps that are in memory.
_LARGEST_RUN = 2**24

# The least epsilon at which rates are compared; the accountant needs one above zero.
_LEAST_EPSILON = 0.01

# Rates are compared at the epsilon of the threshold, and at larger ones, which tell
# more about a mechanism with less noise.
_SLOPES = 1.0, 1.3, 1.7, 2.5

_GRADIENT = 4.0  # of a canary, in clip norms


class Rates(NamedTuple):
    """The shares of canaries in the data, and of others, that are guessed to be in."""

    true: float
    false: float


@dataclasses.dataclass(frozen=True)
class CanaryAudit:
    """What an attacker found out; `str` describes it.

    Attributes:
      epsilon: a lower bound on epsilon at `delta`, with the given `confidence`.
      claimed: the epsilon that the mechanism claims.
      delta: the delta of both.
      confidence: the probability that the lower bound is one.
      num_canaries: the number of canaries.
      rates: the attacker's rates of true and of false guesses.
      mechanism: what a step of the mechanism costs; "" if that is private.
      mistake: what else contradicts the claim, or nothing. A delta of 1 over the number
        of examples or more, which publishing one random example would satisfy; more
        steps than are accounted for; or two steps with the same noise, which cancels in
        their difference. The last one is seen if noise is independent and canaries may
        be absent.
    """

    epsilon: float
    claimed: float
    delta: float
    confidence: float
    num_canaries: int
    rates: Rates
    mechanism: str
    mistake: str = ""

    @property
    def passed(self) -> bool:
        """Whether the attacker did no better than the claim allows."""
        return self.epsilon <= self.claimed and not self.mistake

    def __str__(self) -> str:
        verdict = "is not contradicted" if self.passed else "is FALSE"
        if self.mistake:
            verdict = f"is FALSE: {self.mistake}"
        return _plain_text.paragraph(
            f"{self.num_canaries} canaries: an attacker who sees every noisy gradient "
            f"finds {self.rates.true:.2%} of those in the data, and takes "
            f"{self.rates.false:.2%} of the others for such. So epsilon is at least "
            f"{self.epsilon:.3f} at delta {self.delta:g}, with confidence "
            f"{self.confidence:.0%}. The claim of {self.claimed:.3f} {verdict}."
        )


def canaries(
    mechanism: DPSGD,
    *,
    num_canaries: int | None = None,
    confidence: float = 0.99,
    policy: Policy | str = "float32",
    seed: int | None = None,
) -> CanaryAudit:
    """Computes a lower bound on the epsilon of a mechanism by attacking it.

    It trains a model whose examples are canaries, with the sampling, clipping, sums and
    noise of the mechanism. A loss of your own does not matter here: see `replay`.

    >>> mechanism = DPSGD(
    ...     num_examples=5000, expected_batch_size=500, iterations=20, l2_clip_norm=1.0
    ... ).calibrate(epsilon=4.0, delta=1e-5)
    >>> audit = canaries(mechanism, num_canaries=20_000)
    >>> 1.5 < audit.epsilon <= audit.claimed
    True

    Args:
      mechanism: a calibrated mechanism, whose clip norm does not adapt.
      num_canaries: the number of trials. If the dataset is smaller, or the run long,
        there are several runs. With fewer canaries the bound is lower. None chooses
        2^19, or what 32 runs have if that is less.
      confidence: the confidence of the bound.
      policy: the dtypes of the run.
      seed: decides which canaries are in the data; None draws them.

    Returns:
      The lower bound, beside the claim.

    Raises:
      ValueError: if the mechanism is not private, or its clip norm adapts.
    """
    confidence = _validate.fraction(confidence=confidence)
    _validate.instance(DPSGD, "Use trainer.mechanism.", mechanism=mechanism)
    _validate.optional(_validate.positive_integer)(num_canaries=num_canaries)
    _validate.optional(_validate.nonnegative_integer)(seed=seed)
    if not mechanism.is_private or mechanism.initial_clip_norm is not None:
        _validate.fail(
            "the mechanism must be private, with a clip norm that does not adapt",
            noise_multiplier=mechanism.noise_multiplier,
            fix="Use mechanism.calibrate(epsilon=, delta=), and a number as clip norm.",
        )
    claim, attacker = mechanism.guarantee(), Attacker(mechanism)
    if not math.isfinite(claim.epsilon):
        _validate.fail(
            "the mechanism must claim an epsilon. Use more noise.",
            noise_multiplier=mechanism.noise_multiplier,
        )
    rng = np.random.default_rng(seed)
    size = min(
        num_canaries or _NUM_CANARIES,
        mechanism.num_examples,
        mechanism.num_parameters,
        max(1, _LARGEST_RUN // mechanism.iterations),
    )
    if num_canaries is None:
        num_canaries = max(_FEWEST, min(_NUM_CANARIES, _MOST_RUNS * size))
    num_canaries = _validate.integer_in(
        range(_FEWEST, 2**40),
        f"num_canaries must be an integer of at least {_FEWEST}. With fewer canaries, "
        "an attacker learns nothing.",
        num_canaries=num_canaries,
    )
    coins = rng.random(size) < 0.5
    ideal = attacker.scores(attacker.simulate(coins, rng))
    noisy_gradients = trained(mechanism, size, policy)
    runs, mistake = [], ""
    if claim.delta * mechanism.num_examples >= 1:
        mistake = "its delta is not below 1 over the number of examples"
    for _ in range(math.ceil(num_canaries / size)):
        coins = rng.random(size) < 0.5
        noisy = noisy_gradients(coins)
        if len(noisy) > mechanism.iterations:
            mistake = f"a run made {len(noisy)} steps"
        if _has_repetitions(noisy[:, ~coins]):
            mistake = "two steps have the same noise"
        runs.append((attacker.scores(noisy[: mechanism.iterations]), coins))
    scores, is_in = map(np.concatenate, zip(*runs, strict=True))
    # One threshold is best for an ideal run. The other one is best for a share of these
    # canaries, which the bounds leave out: if noise is missing, scores are others.
    share = len(scores) // _SHARE_TO_LEARN
    thresholds = [
        float(np.quantile(ideal, _QUANTILE)),
        _threshold_between(scores[:share], is_in[:share]),
    ]
    level = (1 - confidence) / (2 * len(thresholds))  # of each rate
    noise, rates = math.inf, Rates(0.0, 0.0)
    for number, threshold in enumerate(thresholds):
        found, bounds = _rates(scores[share:] > threshold, is_in[share:], level)
        less = _most_noise(mechanism, threshold, bounds, claim.delta, noise)
        if less < noise or number == 0:
            noise, rates = less, found
    return CanaryAudit(
        epsilon=_epsilon(mechanism, noise, claim.delta),
        claimed=claim.epsilon,
        delta=claim.delta,
        confidence=confidence,
        num_canaries=len(is_in),
        rates=rates,
        mechanism=name_of(mechanism),
        mistake=mistake,
    )


def trained(
    mechanism: DPSGD, size: int, policy: Policy | str
) -> Callable[[np.ndarray], np.ndarray]:
    """Makes a function of which canaries are in, to noisy gradients, (steps, size)."""
    if not isinstance(mechanism.l2_clip_norm, AutomaticClipping):
        # The model has one array. Its gradients must be in the range of float16.
        mechanism = dataclasses.replace(mechanism, l2_clip_norm=1.0)
    attacker = Attacker(mechanism)
    trainer = DPTrainer(
        mechanism=mechanism,
        loss_fn=lambda params, x: jnp.sum(params[x["number"]] * x["weight"]),
        optimizer=optax.GradientTransformation(
            lambda params: optax.tree_utils.tree_zeros_like(params), _keep_gradient
        ),
        policy=policy,
    )

    def run(is_in: np.ndarray) -> np.ndarray:
        weights = _GRADIENT * np.where(is_in, 1.0, attacker.absent).astype(np.float32)
        noisy: list[np.ndarray] = []

        def rows_of(indices: np.ndarray) -> dict[str, np.ndarray]:
            # The first examples are canaries, and the others are empty.
            number = np.where(indices < size, indices, 0).astype(np.int32)
            weight = np.where(indices == number, weights[number], np.float32(0))
            return {"number": number, "weight": weight}

        def keep(state: TrainingState) -> None:
            noisy.append(np.array(state.opt_state))

        source = ComputedRows(mechanism.num_examples, rows_of)
        start = trainer.init(jnp.zeros(size))
        trainer.fit(start, source, callback=keep, progress=False)
        in_contributions = attacker.noise / mechanism.stddev
        return np.stack(noisy) * in_contributions

    return run


def _keep_gradient(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    """The state of this optimizer is the noisy gradient, and parameters stay zero."""
    del state
    return params, updates


def _has_repetitions(noise: np.ndarray) -> bool:
    """Whether two rows are the same, and not by chance."""
    is_long = noise.shape[1] >= 8
    return is_long and len({x.tobytes() for x in noise}) < len(noise)


def _threshold_between(scores: np.ndarray, is_in: np.ndarray) -> float:
    """The score that separates canaries in the data from others best."""
    candidates = np.quantile(scores, np.linspace(0.01, 0.99, 99))

    def difference(threshold: float) -> float:
        guesses = scores > threshold
        return float(np.mean(guesses[is_in]) - np.mean(guesses[~is_in]))

    return float(max(candidates, key=difference))


def _rates(guesses: np.ndarray, is_in: np.ndarray, level: float) -> tuple[Rates, Rates]:
    """The rates of guesses, and Clopper-Pearson bounds, each at a level."""
    (k, n), (false_k, false_n) = (
        (int(np.sum(guesses[x])), int(np.sum(x))) for x in (is_in, ~is_in)
    )
    lowest = stats.beta.ppf(level, k, n - k + 1) if k else 0.0
    highest = stats.beta.isf(level, false_k + 1, false_n - false_k)
    highest = highest if false_k < false_n else 1.0
    found = Rates(k / max(n, 1), false_k / max(false_n, 1))
    return found, Rates(float(lowest), float(highest))


def _most_noise(
    mechanism: DPSGD, threshold: float, bounds: Rates, delta: float, at_most: float
) -> float:
    """The largest noise multiplier, up to `at_most`, that the bounds on rates allow."""
    true, false = bounds
    if threshold < 0:  # the other guess is the rarer one
        true, false = 1 - false, 1 - true
    if true <= false:
        return at_most
    largest = math.log(true / false)  # above it, the rates tell nothing
    wanted = [slope * abs(threshold) for slope in _SLOPES]
    for epsilon in {0.5 * largest, *(min(x, 0.95 * largest) for x in wanted)}:
        epsilon = max(epsilon, _LEAST_EPSILON)
        excess = true - math.exp(epsilon) * false
        if excess <= delta or _epsilon(mechanism, at_most, excess) >= epsilon:
            continue
        at_most = accounting.calibrate_noise_multiplier(
            lambda x: _cost(mechanism, x).event(mechanism.iterations),
            epsilon=epsilon,
            delta=excess,
            neighboring_relation=mechanism.neighboring_relation,
        )
    return at_most


def _epsilon(mechanism: DPSGD, noise_multiplier: float, delta: float) -> float:
    if math.isinf(noise_multiplier):
        return 0.0
    steps = {_cost(mechanism, noise_multiplier): mechanism.iterations}
    return guarantee_of(steps, delta=delta).epsilon


def _cost(mechanism: DPSGD, noise_multiplier: float) -> PrivacyCost:
    return dataclasses.replace(mechanism.step_cost, noise_multiplier=noise_multiplier)
