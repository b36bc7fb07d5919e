"""Counts the steps of the runs in a ledger, and composes their privacy cost.

A step that is repeated with the same key, data and cost releases the same bits again,
and counts once. Steps of different keys have independent noise, and all count.

The noise is a function of the key and of the step. If a step is repeated with the same
key and other data, the noise cancels in the difference of the two releases. So there is
no finite epsilon then.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import TypeAlias

from dpmp import accounting
from dpmp.mechanism import StepCost, guarantee_of
from dpmp.runs._records import Record

Identity: TypeAlias = tuple[str, str, StepCost]  # of key, data and cost


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """All steps with one key, one tag of the data and one cost.

    Attributes:
      key: the fingerprint of the key.
      data: the tag of the data.
      cost: the cost of a step.
      steps: the steps that were begun, as ranges that are ascending and do not touch.
      num_begun: how often steps were begun, repetitions included.
      first_time: when the first step was begun.
      last_time: when the last record was written.
      deltas: the deltas that the run was planned for.
      last: the steps of the last record.
      before_last: the steps that were begun before it.
    """

    key: str
    data: str
    cost: StepCost
    steps: tuple[range, ...] = ()
    num_begun: int = 0
    first_time: str = ""
    last_time: str = ""
    deltas: frozenset[float] = frozenset()
    last: range = range(0)
    before_last: tuple[range, ...] = ()

    @property
    def identity(self) -> Identity:
        """Steps with the same number and the same identity are the same step."""
        return self.key, self.data, self.cost

    @property
    def num_steps(self) -> int:
        """The number of different steps."""
        return sum(map(len, self.steps))

    def with_steps(self, steps: range) -> "Run":
        """The run after it has begun these steps too."""
        return dataclasses.replace(
            self,
            steps=_union([*self.steps, steps]),
            num_begun=self.num_begun + len(steps),
        )

    def with_record(self, record: Record) -> "Run":
        """The run after what a record states."""
        steps = range(record.start, record.stop)
        new = {record.delta} if record.delta is not None else set()
        # Any other record counts, so that none can hide steps of the records before.
        ends_last = steps.start in self.last and steps.stop == self.last.stop
        is_undone = record.event == "not begun" and ends_last
        return dataclasses.replace(
            self._without(steps) if is_undone else self._with_last(steps),
            first_time=min(filter(None, (self.first_time, record.time))),
            last_time=max(self.last_time, record.time),
            deltas=self.deltas | new,
        )

    def _with_last(self, steps: range) -> "Run":
        changed = self.with_steps(steps)
        return dataclasses.replace(changed, last=steps, before_last=self.steps)

    def _without(self, steps: range) -> "Run":
        """The run if these, the last of the steps recorded last, have not begun."""
        last = range(self.last.start, steps.start)
        return dataclasses.replace(
            self,
            steps=_union([*self.before_last, *filter(None, [last])]),
            num_begun=self.num_begun - len(steps),
            last=last,
        )

    def repeats_noise_of(self, other: "Run") -> bool:
        """Whether the runs have noise in common, but not what it is added to."""
        if self.key != other.key or self.identity == other.identity:
            return False
        together = sum(map(len, _union([*self.steps, *other.steps])))
        return together < self.num_steps + other.num_steps


class History:
    """The runs of one ledger or of several."""

    def __init__(self, records: Iterable[Record] = ()):
        self._runs: dict[Identity, Run] = {}
        for record in records:
            self.add(record)

    @property
    def runs(self) -> list[Run]:
        """All runs, in the order of their first records."""
        return list(self._runs.values())

    def run(self, key: str, data: str, cost: StepCost) -> Run:
        """The run with this key, data and cost, which may have no steps yet."""
        return self._runs.get((key, data, cost), Run(key=key, data=data, cost=cost))

    def add(self, record: Record) -> None:
        """Adds the steps of a record."""
        run = self.run(record.key, record.data, record.cost).with_record(record)
        self._runs[run.identity] = run

    def with_run(self, run: Run) -> list[Run]:
        """All runs, with `run` in the place of what is known of it."""
        return list((self._runs | {run.identity: run}).values())


def repeated_noise(runs: Iterable[Run]) -> list[tuple[Run, Run]]:
    """The pairs of runs that have noise in common, but not what it is added to."""
    pairs = itertools.combinations(runs, 2)
    return [(one, two) for one, two in pairs if one.repeats_noise_of(two)]


def gaps(runs: Iterable[Run], steps: range) -> list[range]:
    """Those of the steps that none of the runs has begun."""
    begun = _union(part for run in runs for part in run.steps)
    starts = [steps.start, *(part.stop for part in begun)]
    stops = [*(part.start for part in begun), steps.stop]
    between = [
        range(max(start, steps.start), min(stop, steps.stop))
        for start, stop in zip(starts, stops, strict=True)
    ]
    return list(filter(None, between))


def guarantee(runs: Iterable[Run], *, delta: float) -> accounting.PrivacyGuarantee:
    """The guarantee of all runs together, if their people are the same.

    Raises:
      ValueError: if `delta` is out of range, or if the runs have different neighbouring
        relations.
    """
    runs = list(runs)
    steps = collections.Counter[StepCost]()
    for run in runs:
        steps[run.cost] += run.num_steps
    total = guarantee_of(steps, delta=delta)
    if repeated_noise(runs):
        reason = "the same noise was added to different sums"
        total = dataclasses.replace(total, epsilon=math.inf, accountant=reason)
    return total


def _union(ranges: Iterable[range]) -> tuple[range, ...]:
    """The same steps as ascending ranges that do not touch."""
    merged: list[range] = []
    for part in sorted(ranges, key=lambda part: part.start):
        if merged and part.start <= merged[-1].stop:
            last = merged.pop()
            part = range(last.start, max(last.stop, part.stop))
        merged.append(part)
    return tuple(merged)
