"""The sizes of batches: how large a drawn batch can be, and what it is padded to."""

import functools
import math
from dataclasses import dataclass

import dp_accounting

from dpmp import accounting

_Relation = dp_accounting.NeighboringRelation


class ComputedProbability(float):
    """A sampling probability that was computed from the sizes of batch and dataset.

    `dataclasses.replace` passes it on, and then it is computed from the new sizes.
    """


def larger_datasets(num_examples: int, relation: _Relation) -> tuple[int, ...]:
    """The sizes that the larger of two neighbouring datasets may have."""
    if relation is _Relation.ADD_OR_REMOVE_ONE:
        return num_examples, num_examples + 1
    return (num_examples,)


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Decides the sizes of batches; `DPSGD` documents the attributes."""

    num_examples: int
    sampling_prob: float
    truncated_batch_size: int | None
    microbatch_size: int | None
    chooses_microbatches: bool  # whether the arithmetic chooses their size itself
    neighboring_relation: _Relation

    @functools.cached_property
    def largest(self) -> int:
        """The size to which larger batches are truncated."""
        sizes = larger_datasets(self.num_examples, self.neighboring_relation)
        num_examples = max(sizes)
        if self.truncated_batch_size is not None:
            # A given size is not lowered where it would give away the size of the data.
            is_public = len(sizes) == 1
            lowered = min(self.truncated_batch_size, num_examples)
            return lowered if is_public else self.truncated_batch_size
        return accounting.choose_truncated_batch_size(
            num_examples, self.sampling_prob, multiple_of=self.microbatch_size or 1
        )

    @property
    def padded(self) -> int:
        """The size to which all batches are padded, so that microbatches divide it."""
        multiple = self.microbatch_size or 1
        if self.microbatch_size is None and self.chooses_microbatches:
            multiple = min(32, 2 ** (self.largest.bit_length() - 1))
        return math.ceil(self.largest / multiple) * multiple
