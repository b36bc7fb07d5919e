"""The loss of predicting the next token, and batches for it."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .dialogues import Dialogue
from .tokenizer import Tokenizer

Apply = Callable[[Any, jax.Array], jax.Array]  # from parameters and tokens to logits
Batch = Mapping[str, Any]


def make_batch(
    tokenizer: Tokenizer, records: Sequence[str | Dialogue], length: int
) -> Batch:
    """Examples of `length` tokens; longer records are cut off, shorter ones padded.

    Returns:
      "tokens": int32 numbers of tokens, (len(records), length).
      "is_target": whether the model shall predict a token, of the same shape. In a
        dialogue, the targets are the tokens that end in a completion. Padding is no
        target. Neither is the first token, which has nothing before it.
    """
    tokens = np.zeros((len(records), length), np.int32)
    is_target = np.zeros((len(records), length), bool)
    for row, mask, record in zip(tokens, is_target, records, strict=True):
        ids, targets = _encode(tokenizer, record)
        row[: len(ids)] = ids[:length]
        mask[: len(ids)] = targets[:length]
    is_target[:, :1] = False
    return {"tokens": tokens, "is_target": is_target}


def _encode(
    tokenizer: Tokenizer, record: str | Dialogue
) -> tuple[list[int], list[bool]]:
    """The tokens of a record, and which of them are targets."""
    if isinstance(record, str):
        ids = tokenizer.encode(record)
        return ids, [True] * len(ids)
    add_marks = not record.has_marks
    ids, ends = tokenizer.encode_with_ends(record.text, add_marks=add_marks)
    # A token across the start of a completion belongs to it; offsets of tokens with a
    # space in front may leave out the space, so that starts would say less than ends.
    return ids, [any(a < end <= b for a, b in record.completions) for end in ends]


def summed_nats(apply: Apply, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Minus the log probability of the targets of each example, and their number.

    Both have the shape of `batch["tokens"]` without its last axis.
    """
    logits = apply(params, batch["tokens"][..., :-1])
    targets, is_target = batch["tokens"][..., 1:], batch["is_target"][..., 1:]
    of_targets = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    nats = jax.nn.logsumexp(logits, -1) - of_targets
    return jnp.sum(jnp.where(is_target, nats, 0), -1), jnp.sum(is_target, -1)


def mean_nats(apply: Apply, params: Any, batch: Batch) -> jax.Array:
    """The loss: nats per target of each example, averaged over the examples."""
    nats, counts = summed_nats(apply, params, batch)
    return jnp.mean(nats / jnp.maximum(counts, 1).astype(nats.dtype))


def nats_per_token(
    apply: Apply, params: Any, batch: Batch, *, batch_size: int = 8
) -> float:
    """Evaluates a model: nats per target, over all targets of all examples."""
    run = jax.jit(functools.partial(summed_nats, apply))
    starts = range(0, len(batch["tokens"]), batch_size)
    parts = [
        run(params, {name: x[i : i + batch_size] for name, x in batch.items()})
        for i in starts
    ]
    nats, counts = (np.concatenate(part) for part in zip(*parts, strict=True))
    return float(nats.sum() / counts.sum())
