"""The batches of a run: drawn by a key and a step number, loaded, padded and placed."""

import dataclasses
from typing import Any

import numpy as np

from dpmp._typing import PyTree
from dpmp.mechanism import DPSGD
from dpmp.training._placed import load_shards
from dpmp.training._source import Load
from dpmp.training._state import TrainingState


@dataclasses.dataclass(frozen=True)
class Batches:
    """Batches and their `is_padding_example`, which are sensitive.

    Attributes:
      mechanism: decides how batches are drawn, and their size.
      load: loads the examples at indices.
      sampling_key: the key of the batches.
      sharding: where to put the batches; None leaves it to jax.
    """

    mechanism: DPSGD
    load: Load
    sampling_key: int
    sharding: Any = None

    def draw(self, step: int) -> tuple[PyTree, Any]:
        """The batch of a step."""
        indices = self.mechanism.sampling.indices(
            step, num_examples=self.mechanism.num_examples, key=self.sampling_key
        )
        return self._load(indices)

    def empty(self) -> tuple[PyTree, Any]:
        """A batch that is all padding, with the types of every other batch."""
        return self._load(np.zeros(0, np.int64))

    def _load(self, indices: np.ndarray) -> tuple[PyTree, Any]:
        return load_shards(self.load, indices, self.mechanism, self.sharding)


def sampling_key(state: TrainingState) -> int:
    """The key of the batches as an integer of 128 bits."""
    return int.from_bytes(np.asarray(state.sampling_key).tobytes(), "little")
