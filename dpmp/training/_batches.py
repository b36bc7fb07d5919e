"""The batches of a run: each is drawn with the ticket of its step."""

import dataclasses
from typing import Any

import jax
import numpy as np

from dpmp._typing import PyTree
from dpmp.mechanism import DPSGD
from dpmp.sources import Load, load_shards
from dpmp.training._tickets import Ticket


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """A batch that was drawn for one step, whose random bits it holds; sensitive.

    Attributes:
      examples: arrays with a leading axis of `mechanism.padded_batch_size`.
      is_padding_example: (padded_batch_size,) bool.
      ticket: the keys of the step.
      mechanism: the mechanism that has drawn it.
    """

    examples: PyTree = dataclasses.field(repr=False)
    is_padding_example: Any = dataclasses.field(repr=False)
    ticket: Ticket = dataclasses.field(repr=False)
    mechanism: DPSGD = dataclasses.field(repr=False)

    def is_of(self, mechanism: DPSGD) -> bool:
        """Whether another mechanism draws batches in the same way."""
        return (self.mechanism.sampling, self.mechanism.num_examples) == (
            mechanism.sampling,
            mechanism.num_examples,
        )


def draw_batch(mechanism: DPSGD, load: Load, sharding: Any, ticket: Ticket) -> Batch:
    """Draws and loads the batch of a ticket."""
    (words,) = ticket.take("batch")
    indices = mechanism.sampling.indices(
        ticket.step,
        num_examples=mechanism.num_examples,
        key=int.from_bytes(words.astype("<u4").tobytes(), "little"),
    )
    batch = load_shards(load, indices, mechanism, sharding)
    return Batch(*batch, ticket, mechanism)


def shapes_of_batch(load: Load) -> PyTree:
    """One example of zeros, with the shapes and dtypes of every other one."""
    rows = load(np.zeros(0, np.int64))
    return jax.tree.map(lambda x: np.zeros((1, *x.shape[1:]), x.dtype), rows)
