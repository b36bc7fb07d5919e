"""What a training run is between two steps, and what it may show besides."""

from typing import NamedTuple

import jax

from dpmp._typing import PyTree


class TrainingState(NamedTuple):
    """All that the next step depends on, besides the data.

    A run that is continued from a saved state repeats, bit for bit, what it would have
    done without the interruption. The keys are secret.

    Attributes:
      step: int32, steps made.
      params: master parameters; released.
      opt_state: state of the optimizer; released.
      noise_state: `noise_addition.NoiseState`, root key and counter of the noise.
      sampling_key: (4,) uint32, root key of the batches.
      model_key: root key of whatever randomness the loss uses.
      scale_state: of a `loss_scaling.DynamicScale`, or None; released.
      metrics: with noise, of the last step; released. NaN before the first.
      update_key: root key of stochastic rounding, or None without.
      fingerprint: uint32, hashes of what the claim about past steps rests on
        (`training/_fingerprint.py`); public. Only a trainer with the same goes on.
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


class SensitiveOutputs(NamedTuple):
    """Un-noised per-example values of one step: for debugging on public data only.

    Attributes:
      values: (padded batch size,) losses, zero for padding.
      grad_norms: (padded batch size,) norms before clipping, zero for padding.
      is_padding_example: (padded batch size,) bool.
    """

    values: jax.Array
    grad_norms: jax.Array
    is_padding_example: jax.Array
