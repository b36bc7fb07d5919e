"""What steps cost: sets of steps, so that nothing is counted twice or lost.

Every call of `fit` makes its steps under a random public id. Two sets that both have a
step under one id have the same step in common, and their union counts it once. A state
that is continued in two ways gets two ids, and both ways count.
"""

import collections
import dataclasses
import struct
from collections.abc import Iterable
from typing import Any

import dp_accounting
import numpy as np

from dpmp import _validate, accounting
from dpmp.mechanism import StepCost, guarantee_of, guarantee_of_stages

# id, start, stop, planned, sampling_prob, noise_multiplier, num_examples,
# truncated_batch_size, num_coordinates, is_clipped, neighboring_relation
_ROW = struct.Struct("<16s QQQ dd QQQ II")
_HEADER = b"dpmp: spent, v1".ljust(_ROW.size, b"\0")
_PROTECTED = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive steps that were made under one id, at one cost.

    Attributes:
      id: 32 hexadecimal digits, random and public.
      start: the first step, counted from 0.
      stop: the step after the last one.
      planned: how many steps of this cost the whole run was to have, as it was planned
        when these steps began.
      cost: the cost of one step.
    """

    id: str
    start: int
    stop: int
    planned: int
    cost: StepCost


@dataclasses.dataclass(frozen=True)
class Spent:
    """A set of steps and their costs, in the order in which they were first made."""

    segments: tuple[Segment, ...] = ()

    def __or__(self, other: "Spent") -> "Spent":
        """The steps that are in one of the sets, or in both."""
        groups: dict[Any, list[Segment]] = collections.defaultdict(list)
        for x in (*self.segments, *other.segments):
            groups[x.id, x.cost].append(x)
        merged = (_merged(group) for group in groups.values())
        return Spent(tuple(x for group in merged for x in group))

    def count(self, cost: StepCost) -> int:
        """The number of steps of one cost."""
        return sum(x.stop - x.start for x in self.segments if x.cost == cost)

    def times_made(self, step: int) -> int:
        """How often a step was made, under different ids."""
        return sum(x.start <= step < x.stop for x in self.segments)

    def guarantee(self, *, delta: float) -> accounting.PrivacyGuarantee:
        """The guarantee of all steps together; see `guarantee_of_stages`."""
        return guarantee_of_stages(self.stages(), delta=delta)

    def stages(self, *, is_over: bool = False) -> dict[StepCost, int]:
        """The number of steps to account for, by their cost.

        If there are several costs, each of them counts with all steps that were
        planned, because someone may have chosen when to end it. A cost that began last
        and is still in use counts with the steps that were made, unless the whole run
        `is_over`.
        """
        planned: dict[StepCost, int] = {}
        for x in self.segments:
            planned[x.cost] = max(planned.get(x.cost, 0), x.planned)
        stages = {cost: max(self.count(cost), n) for cost, n in planned.items()}
        if self.segments and not is_over:
            newest = self.segments[-1].cost
            if newest == next(reversed(stages)):
                stages[newest] = self.count(newest)
        return stages

    def guarantee_if_planned(self, *, delta: float) -> accounting.PrivacyGuarantee:
        """The same if all costs were fixed before the first step."""
        costs = dict.fromkeys(x.cost for x in self.segments)
        return guarantee_of({x: self.count(x) for x in costs}, delta=delta)

    def to_words(self) -> np.ndarray:
        """The set as an array (1 + segments, 22) uint32, which is public.

        It leaves out the number of examples where that is protected.
        """
        rows = [_HEADER, *map(_packed, self.segments)]
        return np.frombuffer(b"".join(rows), "<u4").reshape(len(rows), -1)

    @classmethod
    def from_words(cls, words: Any, *, num_examples: int) -> "Spent":
        """The set that `to_words` has turned into an array.

        Args:
          words: the array.
          num_examples: the number of examples, for steps where it was left out.

        Raises:
          ValueError: for any other array.
        """
        array = np.asarray(words) if np.ndim(words) == 2 else np.zeros((0, 0))
        content = array.astype("<u4").tobytes() if array.dtype == np.uint32 else b""
        _validate.require(
            content.startswith(_HEADER) and len(content) % _ROW.size == 0,
            "state.spent must be what trainer.init, fit or train_step returned",
            shape=np.shape(words),
            fix="It says what the past steps of the state cost. Keep it as it was.",
        )
        rows = _ROW.iter_unpack(content[_ROW.size :])
        return cls(tuple(_unpacked(row, num_examples) for row in rows))


def _merged(group: list[Segment]) -> Iterable[Segment]:
    """The same steps of one id as segments that do not touch, ascending."""
    merged: list[Segment] = []
    planned = max(x.planned for x in group)
    for x in sorted(group, key=lambda x: x.start):
        if merged and x.start <= merged[-1].stop:
            before = merged.pop()
            x = dataclasses.replace(
                x, start=before.start, stop=max(before.stop, x.stop)
            )
        merged.append(dataclasses.replace(x, planned=planned))
    return merged


def _packed(x: Segment) -> bytes:
    cost = x.cost
    is_protected = cost.neighboring_relation is _PROTECTED
    return _ROW.pack(
        bytes.fromhex(x.id),
        x.start,
        x.stop,
        x.planned,
        cost.sampling_prob,
        cost.noise_multiplier,
        0 if is_protected else cost.num_examples,
        cost.truncated_batch_size,
        cost.num_coordinates,
        cost.is_clipped,
        cost.neighboring_relation.value,
    )


def _unpacked(row: tuple[Any, ...], num_examples: int) -> Segment:
    id_, start, stop, planned, prob, noise, examples, size, entries, clipped, rel = row
    cost = StepCost(
        sampling_prob=prob,
        num_examples=examples or num_examples,
        truncated_batch_size=size,
        noise_multiplier=noise,
        is_clipped=bool(clipped),
        num_coordinates=entries,
        neighboring_relation=dp_accounting.NeighboringRelation(rel),
    )
    return Segment(id=id_.hex(), start=start, stop=stop, planned=planned, cost=cost)
