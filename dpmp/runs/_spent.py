"""The privacy cost of steps, kept as sets of steps: none is counted twice or lost.

Every call of `fit`, and every chain of `train_step`, makes its steps under a random
public id. Steps of the same number under the same id are the same step. A state that is
continued in two ways gets two ids, and both ways count.
"""

import collections
import dataclasses
import hashlib
import json
from collections.abc import Iterable
from typing import Any

import dp_accounting
import numpy as np

from dpmp import _validate, accounting
from dpmp.mechanism import PrivacyCost, guarantee_of, guarantee_of_stages

_PROTECTED = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive steps that were made under one id, at one cost."""

    id: str  # 32 hexadecimal digits, random and public
    start: int  # counted from 0
    stop: int  # the step after the last one
    planned: int  # steps of this cost in the whole run, as planned when these began
    cost: PrivacyCost  # of one step


@dataclasses.dataclass(frozen=True)
class Spent:
    """A set of steps and their costs."""

    segments: tuple[Segment, ...] = ()

    @classmethod
    def of(cls, segments: Iterable[Segment]) -> "Spent":
        """The steps of segments that may overlap."""
        groups: dict[Any, list[Segment]] = collections.defaultdict(list)
        for x in segments:
            if x.start < x.stop:  # a complete state is saved by a record without steps
                groups[x.id, x.cost].append(x)
        merged = (_merged(group) for group in groups.values())
        return cls(tuple(x for group in merged for x in group))

    def __or__(self, other: "Spent") -> "Spent":
        """The steps that are in one of the sets, or in both."""
        return Spent.of((*self.segments, *other.segments))

    def beside(self, other: "Spent") -> "Spent":
        """Both sets, made by runs that did not know of each other: plans add up."""
        union, ours, theirs = self | other, self.planned(), other.planned()
        segments = list(union.segments)
        for i, x in enumerate(segments):
            counts = self.count(x.cost), other.count(x.cost)
            in_both = sum(counts) - union.count(x.cost)
            if in_both < min(counts):  # each of them has steps of its own
                planned = ours[x.cost] + theirs[x.cost] - in_both
                segments[i] = dataclasses.replace(x, planned=planned)
        return Spent(tuple(segments))

    def without(self, other: "Spent") -> "Spent":
        """The segments with steps that are not in another set."""
        return Spent(
            tuple(
                x
                for x in self.segments
                if (other | Spent((x,))).count(x.cost) > other.count(x.cost)
            )
        )

    def count(self, cost: PrivacyCost) -> int:
        """The number of steps of one cost."""
        return sum(x.stop - x.start for x in self.segments if x.cost == cost)

    def times_made(self, step: int) -> int:
        """How often a step was made, under different ids."""
        return sum(x.start <= step < x.stop for x in self.segments)

    def planned(self) -> dict[PrivacyCost, int]:
        """The number of steps that were planned, or made if that is more, by cost."""
        numbers = {x.cost: self.count(x.cost) for x in self.segments}
        for x in self.segments:
            numbers[x.cost] = max(numbers[x.cost], x.planned)
        return numbers

    def guarantee(self, *, delta: float) -> accounting.PrivacyGuarantee:
        """The guarantee of all steps together.

        Steps of one cost count as they were made. If there are several costs, each of
        them counts with all its planned steps, because someone may have looked at
        results to choose the next cost, and when to end the one before.
        """
        planned = self.planned()
        if len(planned) <= 1:
            return self.guarantee_if_planned(delta=delta)
        runs = self._runs()
        stages = [cost.of_plan(runs[cost], number) for cost, number in planned.items()]
        return guarantee_of_stages(stages, delta=delta)

    def guarantee_if_planned(self, *, delta: float) -> accounting.PrivacyGuarantee:
        """The guarantee if all costs were fixed before the first step."""
        numbers: dict[PrivacyCost, int] = collections.Counter()
        for cost, runs in self._runs().items():
            numbers.update(cost.of_runs(runs))
        return guarantee_of(numbers, delta=delta)

    def _runs(self) -> dict[PrivacyCost, list[range]]:
        """The ranges of the segments, by cost."""
        runs = collections.defaultdict(list)
        for x in self.segments:
            runs[x.cost].append(range(x.start, x.stop))
        return runs

    def to_array(self) -> np.ndarray:
        """The set as a text, (bytes,) uint8, which is public.

        It leaves out the number of examples if that number is protected.
        """
        rows = [segment_as_json(x) for x in self.segments]
        for row in rows:
            if row["cost"]["neighboring_relation"] == _PROTECTED:
                row["cost"]["num_examples"] = None
        text = json.dumps({"spent": rows, "checksum": _checksum(rows)})
        return np.frombuffer(text.encode(), np.uint8)

    @classmethod
    def from_array(cls, array: Any, *, num_examples: int) -> "Spent":
        """The set that `to_array` has turned into an array."""
        try:
            # Some libraries save integers as int32.
            fields = json.loads(bytes(np.asarray(array).astype(np.uint8)))
            rows = fields["spent"]
            # The average of two texts is often a text of the same form.
            if fields["checksum"] != _checksum(rows):
                raise ValueError
            for row in rows:
                if row["cost"]["num_examples"] is None:
                    row["cost"]["num_examples"] = num_examples
            return cls(tuple(segment_from_json(row) for row in rows))
        except (KeyError, RecursionError, TypeError, ValueError):
            pass
        _validate.fail(
            "state.spent must be what trainer.init, fit or train_step returned. It "
            "says what the past steps of the state cost. Keep it as it was. For "
            "averaged parameters, use newest_state._replace(params=average).",
            shape=np.shape(array),
        )


def segment_as_json(segment: Segment) -> dict[str, Any]:
    """The fields of a segment, as numbers and texts."""
    fields = dataclasses.asdict(segment)
    fields["cost"]["neighboring_relation"] = segment.cost.neighboring_relation.name
    return fields


def segment_from_json(fields: dict[str, Any]) -> Segment:
    """Undoes `segment_as_json`; raises KeyError or TypeError for other fields."""
    cost = fields["cost"]
    relation = dp_accounting.NeighboringRelation[cost["neighboring_relation"]]
    cost = PrivacyCost(**{**cost, "neighboring_relation": relation})
    return Segment(**{**fields, "cost": cost})


def _checksum(rows: list[dict[str, Any]]) -> str:
    return hashlib.blake2b(json.dumps(rows).encode(), digest_size=8).hexdigest()


def _merged(group: list[Segment]) -> Iterable[Segment]:
    """The same steps of one id as segments that do not touch, ascending."""
    merged: list[Segment] = []
    planned = max(x.planned for x in group)
    for x in sorted(group, key=lambda x: x.start):
        start, stop = x.start, x.stop
        if merged and start <= merged[-1].stop:
            before = merged.pop()
            start, stop = before.start, max(before.stop, stop)
        merged.append(dataclasses.replace(x, start=start, stop=stop, planned=planned))
    return merged
