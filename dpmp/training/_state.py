"""The state of a run between two steps, and the sensitive outputs of a step."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import jax

from dpmp._typing import PyTree


class TrainingState(NamedTuple):
    """Everything that the next step depends on, besides the data.

    A run that continues from a saved state is the same, bit for bit, as a run without
    the interruption. The keys are secret.

    Attributes:
      step: int32, the number of steps made so far.
      params: the master parameters; released.
      opt_state: the state of the optimizer; released.
      noise_state: a `noise_addition.NoiseState` with the root key of the noise; secret.
      sampling_key: (4,) uint32, the root key of the batches; secret.
      model_key: the root key of the randomness in the loss; secret.
      scale_state: the state of a `loss_scaling.DynamicScale`, or None; released.
      metrics: the noisy metrics of the last step, NaN before the first; released.
        "overflowed" is always among them: the fraction of examples whose gradient is
        not finite.
      update_key: the root key of stochastic rounding, or None without; secret.
      fingerprint: uint32, hashes of the facts that the privacy claim about past steps
        rests on (`training/_fingerprint.py`). A trainer with other facts refuses to
        continue the run. The hashes are encrypted with `sampling_key`, so that they say
        nothing without it.
      clip_norm: the clip norm of the next step, a float32 scalar; None unless the
        mechanism has an `AdaptiveClipNorm`; released.
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    noise_state: PyTree
    sampling_key: jax.Array
    model_key: jax.Array
    scale_state: PyTree = None
    metrics: PyTree = None
    update_key: jax.Array | None = None
    fingerprint: jax.Array | None = None
    clip_norm: jax.Array | None = None


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
