"""The state of a run between two steps, and the sensitive outputs of a step."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax

from dpmp._typing import PyTree


class TrainingState(NamedTuple):
    """Everything that the next step depends on, besides the data and fresh random bits.

    All of it is released, and nothing is secret: you may print a state, save it with
    any library, publish it, and continue it in two ways. Both ways cost privacy.

    Attributes:
      step: int32, the number of steps made so far.
      params: the master parameters.
      opt_state: the state of the optimizer.
      scale_state: the state of a `loss_scaling.DynamicScale`, or None.
      metrics: the noisy metrics of the last step, NaN before the first. "overflowed" is
        always among them: the fraction of examples whose gradient is not finite.
      clip_norm: the clip norm of the next step, a float32 scalar; None unless the
        mechanism has an `AdaptiveClipNorm`.
      spent: the privacy cost of the past steps, as an array of uint8, a text in JSON.
        It has random public ids, ranges of steps, noise multipliers, sampling
        probabilities and batch sizes, and the number of examples if that is public.
        Save it with the rest: `DPTrainer.guarantee` reads it.
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    scale_state: PyTree = None
    metrics: PyTree = None
    clip_norm: jax.Array | None = None
    spent: Any = None


# It may return numbers that were computed from public data or from released values.
Callback: TypeAlias = Callable[[TrainingState], Mapping[str, float] | None]


class SensitiveOutputs(NamedTuple):
    """Per-example values of one step without noise, for debugging on public data only.

    Attributes:
      values: (padded batch size,) losses, zero for padding.
      grad_norms: (padded batch size,) norms before clipping, zero for padding.
      is_padding_example: (padded batch size,) bool.
    """

    values: jax.Array
    grad_norms: jax.Array
    is_padding_example: jax.Array
