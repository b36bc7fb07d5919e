"""Computes the privacy cost of steps, of one run or of several runs on the same data.

A small share of delta is charged for the samplers. Each entry of the noise deviates
slightly from an ideal discrete Gaussian (`noise_addition/_discrete_gaussian.py`), and
each batch from independent inclusion (`batch_selection/_draws.py`). Let t be the sum
of the total variation distances of all entries and batches. The probability of any
outcome changes by at most t, for both of two neighbouring datasets. In
P <= exp(epsilon) P' + delta, this costs t on the left and exp(epsilon) t on the right:
(1 + exp(epsilon)) t of delta. If the share does not cover this, no finite epsilon is
claimed.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import dp_accounting

from dpmp import _validate, accounting
from dpmp.batch_selection import SAMPLING_TOTAL_VARIATION
from dpmp.noise_addition import NOISE_TOTAL_VARIATION

_SHARE = 1e-4  # of delta, for the samplers

POISSON = "poisson"
SAMPLINGS = POISSON, "random_allocation"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyCost:
    """The quantities that determine the privacy cost of one step; see `DPSGD`."""

    sampling_prob: float
    num_examples: int
    truncated_batch_size: int  # the size of the largest batch
    noise_multiplier: float  # 0 for no privacy
    is_clipped: bool  # whether the norm of a contribution has a bound
    num_coordinates: int  # the entries that receive noise, or an upper bound
    neighboring_relation: dp_accounting.NeighboringRelation
    sampling: str = POISSON
    cycle_length: int = 1  # the number of groups of examples that take turns

    def event(
        self, steps: int, num_examples: int | None = None
    ) -> dp_accounting.DpEvent:
        """Steps as an event; `num_examples` is the size of the larger dataset.

        With random allocation, an epoch that they begin counts as a whole one.
        """
        num_examples = num_examples or max(self.larger_datasets)
        noise_multiplier = self.noise_multiplier if self.is_clipped else 0.0
        if epoch := steps_per_epoch(self):
            return accounting.random_allocation_event(
                noise_multiplier,
                steps,
                steps_per_epoch=epoch,
                num_examples=num_examples,
                truncated_batch_size=self.truncated_batch_size,
            )
        # An example takes part in a step of each cycle.
        steps = math.ceil(steps / self.cycle_length)
        num_examples = math.ceil(num_examples / self.cycle_length)
        if self.truncated_batch_size >= num_examples:
            return accounting.dpsgd_event(
                noise_multiplier, steps, sampling_prob=self.sampling_prob
            )
        return accounting.truncated_dpsgd_event(
            noise_multiplier,
            steps,
            sampling_prob=self.sampling_prob,
            num_examples=num_examples,
            truncated_batch_size=self.truncated_batch_size,
        )

    def of_runs(self, runs: Sequence[range]) -> "dict[PrivacyCost, int]":
        """What steps cost that were made by runs which began, or went on, in between.

        With random allocation, a run that goes on inside an epoch makes the rest of it
        with Poisson steps, and the last epoch of a run counts as a whole one. With
        groups that take turns, every cycle that a run begins counts as a whole one: if
        the dataset is shuffled between two runs, an example may change its group.
        """
        epoch, cycle = steps_per_epoch(self), self.cycle_length
        if epoch is None:
            return {self: sum(math.ceil(len(x) / cycle) * cycle for x in runs)}
        numbers: dict[PrivacyCost, int] = collections.Counter()
        poisson = dataclasses.replace(self, sampling=POISSON)
        for x in runs:
            first = min(x.stop, math.ceil(x.start / epoch) * epoch)
            numbers[poisson] += first - x.start
            numbers[self] += math.ceil((x.stop - first) / epoch) * epoch
        return {cost: number for cost, number in numbers.items() if number}

    def of_plan(self, runs: Sequence[range], planned: int) -> "dict[PrivacyCost, int]":
        """The most that `planned` steps cost if any of the runs make the missing ones.

        Each run may first complete its epoch. Then each may begin one epoch or cycle
        more than its steps fill.
        """
        left = max(0, planned - sum(map(len, runs)))
        epoch = steps_per_epoch(self)
        period = epoch or self.cycle_length
        if len(runs) == 1:
            return self.of_runs([range(runs[0].start, runs[0].stop + left)])
        if epoch and left:
            runs = [range(x.start, math.ceil(x.stop / epoch) * epoch) for x in runs]
        numbers = self.of_runs(runs)
        begun = min(len(runs), left) if period > 1 else 0
        more = (left // period + begun) * period
        return numbers | {self: numbers.get(self, 0) + more}

    @property
    def larger_datasets(self) -> tuple[int, ...]:
        """The sizes that the larger of two neighbouring datasets may have."""
        sizes = self.num_examples, self.num_examples + 1
        relations = dp_accounting.NeighboringRelation
        is_added = self.neighboring_relation is relations.ADD_OR_REMOVE_ONE
        return sizes if is_added else sizes[:1]


def steps_per_epoch(x: Any) -> int | None:
    """The steps of an epoch of random allocation; None for Poisson sampling."""
    return None if x.sampling == POISSON else round(1 / x.sampling_prob)


def calibrate(cost: PrivacyCost, steps: int, *, epsilon: float, delta: float) -> float:
    """The least noise multiplier for which all steps satisfy (epsilon, delta).

    `cost` is the cost of one step; its noise multiplier is ignored.
    """
    epsilon = _validate.positive(epsilon=epsilon, fix="Use 8, for example.")
    delta = accounting.check_delta(delta)
    largest = _largest_epsilon({cost: steps}, delta)
    if not largest > 0:
        _validate.fail(
            "delta must cover how far the sampler of the noise is from ideal noise",
            delta=delta,
            fix="Use a larger delta, fewer iterations, or a num_parameters closer to "
            "the number of trained parameters.",
        )
    if not epsilon <= largest:
        _validate.fail(
            f"epsilon must be at most {largest:.4g}: above that, the sampler of the "
            "noise limits epsilon, and not the width of the noise",
            epsilon=epsilon,
            fix="Use a smaller epsilon, or without_privacy(), which claims none.",
        )

    def event(noise_multiplier: float, size: int) -> dp_accounting.DpEvent:
        noisy = dataclasses.replace(cost, noise_multiplier=noise_multiplier)
        return noisy.event(steps, size)

    return max(
        accounting.calibrate_noise_multiplier(
            functools.partial(event, size=size),
            epsilon=epsilon,
            delta=delta * (1 - _SHARE),
            neighboring_relation=cost.neighboring_relation,
        )
        for size in cost.larger_datasets
    )


def guarantee_of(
    steps: Mapping[PrivacyCost, int], *, delta: float
) -> accounting.PrivacyGuarantee:
    """Computes epsilon of all steps together, given the number of steps of each cost.

    A person may be in the datasets of all steps. Steps of different costs may have
    different datasets, as long as one person is one example in each.

    Raises:
      ValueError: if `delta` is out of range, or if the steps have different
        neighbouring relations.
    """
    delta = accounting.check_delta(delta)
    return _guarantee_of(tuple(steps.items()), delta)


# Reports and statements ask for the same epsilons again and again.
@functools.lru_cache(maxsize=1024)
def _guarantee_of(
    steps: tuple[tuple[PrivacyCost, int], ...], delta: float
) -> accounting.PrivacyGuarantee:
    relation = _common_relation([cost for cost, _ in steps])
    # If a person is added, every larger dataset has one example more.
    neighbours = zip(*(cost.larger_datasets for cost, _ in steps), strict=True)
    guarantees = []
    for sizes in list(neighbours) or [()]:
        pairs = zip(steps, sizes, strict=True)
        event = dp_accounting.ComposedDpEvent([c.event(n, x) for (c, n), x in pairs])
        guarantees.append(
            accounting.get_epsilon(
                event, delta=delta * (1 - _SHARE), neighboring_relation=relation
            )
        )
    worst = max(guarantees, key=lambda guarantee: guarantee.epsilon)
    is_covered = worst.epsilon <= _largest_epsilon(dict(steps), delta)
    epsilon = worst.epsilon if is_covered else math.inf
    return dataclasses.replace(worst, epsilon=epsilon, delta=delta)


def guarantee_of_stages(
    stages: Sequence[Mapping[PrivacyCost, int]], *, delta: float
) -> accounting.PrivacyGuarantee:
    """Computes epsilon of stages whose costs were chosen one after the other.

    Steps of one stage compose numerically. The theorem behind this composition needs
    costs that are fixed in advance. But someone may choose the next cost after looking
    at the results of the last stage, so the epsilons of stages are added up. Nobody
    knows in advance how many stages there will be. So each new stage halves the delta
    of all stages: each of k stages gets delta / 2^(k - 1); see docs/proofs.md.

    Args:
      stages: for each stage, in any order, the costs of its steps, and the largest
        number of steps of each cost that it could have had when it began.
      delta: the delta of all stages together.

    Raises:
      ValueError: as `guarantee_of`.
    """
    delta = accounting.check_delta(delta)
    if len(stages) <= 1:
        return guarantee_of(dict(*stages), delta=delta)
    _common_relation([cost for stage in stages for cost in stage])
    share = delta / 2 ** (len(stages) - 1)
    parts = [guarantee_of(stage, delta=share) for stage in stages]
    return dataclasses.replace(
        parts[-1],
        epsilon=math.nextafter(math.fsum(part.epsilon for part in parts), math.inf),
        delta=delta,
        accountant=f"{parts[-1].accountant}, added up over {len(parts)} costs",
    )


def _largest_epsilon(steps: Mapping[PrivacyCost, int], delta: float) -> float:
    """The largest epsilon for which the share covers the samplers' deviation."""
    batches = max(1, sum(steps.values()))
    entries = max(1, sum(n * cost.num_coordinates for cost, n in steps.items()))
    deviation = entries * NOISE_TOTAL_VARIATION
    deviation += batches * SAMPLING_TOTAL_VARIATION
    share = _SHARE * delta / deviation
    return math.log(share - 1) if share > 1 else -math.inf


def _common_relation(costs: list[PrivacyCost]) -> dp_accounting.NeighboringRelation:
    """The neighbouring relation of all costs; the default one if there are none."""
    relations = {cost.neighboring_relation for cost in costs}
    if len(relations) > 1:
        _validate.fail(
            "epsilons can be composed only if all runs have one neighbouring relation",
            neighboring_relations=sorted(relation.name for relation in relations),
            fix="Compute epsilon for each relation alone, and report both.",
        )
    return relations.pop() if relations else accounting.DEFAULT_RELATION
