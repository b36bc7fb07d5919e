"""The batches of a run: each is drawn with the ticket of its step."""

import dataclasses
from typing import Any

from dpmp._typing import PyTree
from dpmp.mechanism import DPSGD
from dpmp.sources import Load, load_shards
from dpmp.training._tickets import Ticket


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Batch:
    """A batch that was drawn for one step, whose random bits it holds; sensitive.

    Attributes:
      examples: arrays with a leading axis of `mechanism.padded_batch_size`.
      is_padding_example: (padded_batch_size,) bool.
      ticket: the keys of the step.
      mechanism: the mechanism that has drawn it.
    """

    examples: PyTree
    is_padding_example: Any
    ticket: Ticket
    mechanism: DPSGD


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
