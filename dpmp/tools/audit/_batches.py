"""Audits how batches are drawn, against what the accountant assumes.

Batches of a fixed size, examples that come back too early, or too often in one batch,
are the most frequent mistakes of samplers. They change no noise, so that no canary sees
them.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from scipy import stats

from dpmp import _plain_text, _validate
from dpmp.mechanism import DPSGD
from dpmp.tools.audit._attacker import ComputedRows, name_of
from dpmp.training import DPTrainer, TrainingState

# Correct batches fail one of the tests by chance once in a million audits, or less:
# each test exceeds its limits with probability exp(-16) on either side.
_LOG_CHANCE = 16.0


@dataclasses.dataclass(frozen=True)
class BatchAudit:
    """What is wrong with batches; `str` describes it.

    Attributes:
      num_batches: the number of batches that were drawn.
      wrong: what the accountant assumes and the batches do not do, in words.
      mechanism: what a step of the mechanism costs; "" if that is private.
    """

    num_batches: int
    wrong: tuple[str, ...]
    mechanism: str

    @property
    def passed(self) -> bool:
        """Whether batches are drawn as the accountant assumes."""
        return not self.wrong

    def __str__(self) -> str:
        verdict = "are drawn as accounted for." if self.passed else "are not:"
        head = _plain_text.paragraph(f"{self.num_batches} batches {verdict}")
        return "\n".join([head, *(f"- {x}" for x in self.wrong)])


def batches(mechanism: DPSGD, *, num_batches: int = 2000) -> BatchAudit:
    """Checks that batches are drawn as the accountant of a mechanism assumes.

    Poisson sampling draws each example of a group independently: sizes of batches,
    participations of examples, and examples that two batches have in common vary as
    independent draws do. Random allocation draws every example once in each epoch.

    >>> mechanism = DPSGD(
    ...     num_examples=500, expected_batch_size=20, iterations=50, l2_clip_norm=1.0
    ... )
    >>> print(batches(mechanism, num_batches=100))
    100 batches are drawn as accounted for.

    Args:
      mechanism: the mechanism, with which `DPTrainer.fit` trains a model of one number.
      num_batches: about how many batches to draw, in whole runs.
    """
    num_batches = _validate.positive_integer(num_batches=num_batches)
    _validate.instance(DPSGD, "Use trainer.mechanism.", mechanism=mechanism)
    given = mechanism
    mechanism = dataclasses.replace(
        mechanism, l2_clip_norm=1.0, noise_multiplier=mechanism.noise_multiplier or 1.0
    )
    runs = math.ceil(num_batches / mechanism.iterations)
    drawn = _indices_of_runs(mechanism, runs)
    wrong = [x for run in drawn for x in _impossible(mechanism, run)]
    wrong = wrong or list(_unlikely(mechanism, drawn))
    number = runs * mechanism.iterations
    return BatchAudit(number, tuple(dict.fromkeys(wrong)), name_of(given))


def _indices_of_runs(mechanism: DPSGD, runs: int) -> list[list[np.ndarray]]:
    """The batches of runs of `DPTrainer.fit`."""
    trainer = DPTrainer(
        mechanism=mechanism,
        loss_fn=lambda params, batch: jnp.sum(params * batch),
        optimizer=optax.sgd(0.0),
        policy="float32",
    )

    def run() -> list[np.ndarray]:
        asked: list[np.ndarray] = []
        drawn: list[np.ndarray] = []

        def rows_of(indices: np.ndarray) -> np.ndarray:
            asked.append(indices)
            return np.zeros(len(indices), np.float32)

        def keep(state: TrainingState) -> None:
            # A run begins by asking for examples 0 and 1, and asks for no empty batch.
            del state
            drawn.extend(asked[1:] or [np.zeros(0, np.int64)])
            del asked[1:]

        source = ComputedRows(mechanism.num_examples, rows_of)
        start = trainer.init(jnp.zeros(()))
        trainer.fit(start, source, callback=keep, progress=False, prefetch=0)
        return drawn

    return [run() for _ in range(runs)]


def _impossible(mechanism: DPSGD, run: list[np.ndarray]) -> Iterator[str]:
    """What never happens in batches that are drawn as accounted for."""
    size, groups = mechanism.num_examples, mechanism.cycle_length
    for step, batch in enumerate(run):
        if len(np.unique(batch)) < len(batch):
            yield "An example is in a batch more than once."
        if np.any((batch < 0) | (batch >= size)):
            yield "A batch has an index that is no example."
        if np.any(batch % groups != step % groups):
            yield "An example takes part in the turn of another group."
    epoch = mechanism.steps_per_epoch or 0
    for start in range(0, len(run) - epoch + 1, epoch) if epoch else ():
        drawn = np.concatenate(run[start : start + epoch])
        if not np.array_equal(np.sort(drawn), np.arange(size)):
            yield "An epoch does not have every example once."


def _unlikely(mechanism: DPSGD, runs: list[list[np.ndarray]]) -> Iterator[str]:
    """What happens once in a million audits if batches are drawn as accounted for."""
    size, groups = mechanism.num_examples, mechanism.cycle_length
    prob, epoch = float(mechanism.sampling_prob or 0.0), mechanism.steps_per_epoch
    steps = np.arange(mechanism.iterations)
    of_groups = np.array([len(range(i, size, groups)) for i in range(groups)])
    members = np.tile(of_groups[steps % groups], len(runs))
    sizes = np.array([len(x) for run in runs for x in run])
    if epoch is None:
        turns = np.array([len(steps[i::groups]) for i in range(groups)])
        turns = len(runs) * turns[np.arange(size) % groups]
        all_indices = np.concatenate([x for run in runs for x in run])
        times = np.bincount(all_indices, minlength=size)
        if _is_unlikely(np.sum(sizes), *_moments(np.sum(members), prob)[:2]):
            yield "Batches are smaller or larger than they should be."
        if _varies_wrongly(times, turns, prob):
            yield "How often examples take part varies less or more than it should."
        tails = (
            stats.binom.cdf(times, turns, prob),
            stats.binom.sf(times - 1, turns, prob),
        )
        if 2 * size * np.min(tails) < math.exp(-_LOG_CHANCE):
            yield "An example takes part less or more often than it should."
    # In an epoch, other steps have fewer examples if one has more.
    related = 1.0 if epoch in (None, 1) else epoch / (epoch - 1)
    if _varies_wrongly(sizes, members, prob, related):
        yield "The sizes of batches vary less or more than they should."
    period = epoch or groups
    common = [
        len(np.intersect1d(*pair, assume_unique=True))
        for run in runs
        for pair in zip(run, run[period:], strict=False)
    ]
    pairs = size / groups * len(common)
    # Two pairs of batches share a batch.
    variance = pairs * (prob**2 * (1 - prob**2) + 2 * prob**3 * (1 - prob))
    if _is_unlikely(sum(common), pairs * prob**2, variance):
        yield "Batches have more or fewer examples in common than they should."


def _moments(number: Any, prob: float) -> tuple[Any, Any, Any]:
    """Mean, variance and fourth central moment of a binomial distribution."""
    variance = number * prob * (1 - prob)
    fourth = variance * (1 + 3 * (number - 2) * prob * (1 - prob))
    return number * prob, variance, fourth


def _varies_wrongly(
    found: np.ndarray, numbers: np.ndarray, prob: float, related: float = 1.0
) -> bool:
    mean, variance, fourth = _moments(numbers.astype(float), prob)
    spread = np.sum((found - mean) ** 2)
    deviation = related * np.sum(fourth - variance**2)
    scale = max(8.0, float(np.max(variance)))
    return _is_unlikely(spread, np.sum(variance), deviation, scale)


def _is_unlikely(
    found: float, mean: float, variance: float, scale: float = 1.0
) -> bool:
    """Whether a sum of many independent numbers, none below zero, is far from its mean.

    Sums of rare events, and of squares, have a heavier tail above than below
    ([Boucheron et al.: Concentration inequalities, sections 2.7 and
    2.8](https://doi.org/10.1093/acprof:oso/9780199535255.001.0001)).
    """
    limit = math.sqrt(2 * _LOG_CHANCE * variance) + 1e-6 * mean
    return not -limit <= found - mean <= limit + 2 * _LOG_CHANCE * scale
