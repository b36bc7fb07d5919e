"""The operations that clipping and summing per-example gradients adds to training.

Training takes about 6 N D operations, for N parameters and D positions (tokens) in the
batch: a multiplication and an addition for each pair in the forward pass, and twice
that in the backward pass. Clipped sums read every entry of every example's gradient,
for the norm (a square and an addition) and for the sum (a product and an addition): 4 B
N', for B examples and N' trainable parameters. That is a share of 2 N' / (3 N T) with T
positions per example: little for long sequences, and about as much as the training
itself where an example has one position.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dpmp import _timing, _validate
from dpmp._typing import PyTree
from dpmp.clipping import clipped_grad


@dataclass(frozen=True)
class AccumulationOverhead:
    """The operations of one batch.

    Attributes:
      accumulation: the operations of norms and clipped sums.
      training: the operations of the forward and the backward pass.
    """

    accumulation: int
    training: int

    @property
    def share(self) -> float:
        """Operations of accumulation over those of training."""
        return self.accumulation / self.training

    def __str__(self) -> str:
        return (
            f"Clipped sums take {self.accumulation:.3g} operations and training takes "
            f"{self.training:.3g}: {self.share:.3%} more."
        )


def accumulation_overhead(
    params: PyTree | int,
    *,
    batch_size: int,
    num_positions: int,
    num_trainable: int | None = None,
) -> AccumulationOverhead:
    """Counts the operations of clipped sums of per-example gradients.

    >>> print(accumulation_overhead(10**9, batch_size=512, num_positions=512 * 1024))
    Clipped sums take 2.05e+12 operations and training takes 3.15e+15: 0.065% more.

    Exact sums also round every entry and square integers, and take a few times as long
    unless memory limits the speed. Book-keeping takes other operations.

    Args:
      params: arrays, shapes, or the number of parameters of the model.
      batch_size: the number of examples in a batch.
      num_positions: the number of tokens in a batch, or of examples without positions.
      num_trainable: the number of parameters that have gradients; None for all.

    Raises:
      ValueError: for sizes that are not positive integers.
    """
    num_parameters = params
    if not _validate.is_integer(params):  # an array without axes is one parameter
        num_parameters = sum(math.prod(jnp.shape(x)) for x in jax.tree.leaves(params))
    sizes = {
        "num_parameters": num_parameters,
        "batch_size": batch_size,
        "num_positions": num_positions,
        "num_trainable": num_parameters if num_trainable is None else num_trainable,
    }
    num_parameters, batch_size, num_positions, num_trainable = (
        _validate.positive_integer(**{name: size}, fix="Count them.")
        for name, size in sizes.items()
    )
    accumulation = 4 * batch_size * num_trainable
    return AccumulationOverhead(accumulation, 6 * num_parameters * num_positions)


def measure_accumulation_share(
    loss_fn: Callable[[PyTree, PyTree], jax.Array],
    params: PyTree,
    batch: PyTree,
    *,
    rounds: int = 3,
    **options: Any,
) -> float:
    """Compares the time of a clipped sum to that of the plain gradient of the batch.

    The difference is all that privacy adds to a gradient. It includes the loss of speed
    where a layer has one product per example in place of one for the whole batch.

    Args:
      loss_fn: as in `clipped_grad`; it must return the mean loss of a larger batch.
      params: arrays, or shapes (`jax.ShapeDtypeStruct`), which stand for zeros.
      batch: arrays or shapes too. Only shapes matter, so do not pass private data.
      rounds: the number of times that each function is timed, in turn.
      **options: of `clipped_grad`, such as `method`, `arithmetic`, `microbatch_size`.

    Returns:
      The median over rounds of the time that clipping adds, over the plain time.

    Raises:
      ValueError: for `rounds` that is not a positive integer, and as `clipped_grad`.
    """
    rounds = _validate.positive_integer(rounds=rounds, fix="Use 3.")
    clipped = clipped_grad(loss_fn, l2_clip_norm=1.0, **options)
    functions = {"plain": jax.grad(loss_fn), "clipped": clipped}
    _, seconds = _timing.measure(functions, rounds, params, batch)
    return _timing.median_ratio(seconds["clipped"], seconds["plain"]) - 1
