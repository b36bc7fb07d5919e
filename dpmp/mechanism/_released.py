"""Splits the noisy output of a step into gradients, overflows and metrics."""

from typing import Any, NamedTuple

import jax

from dpmp._numbers import as_real
from dpmp._typing import PyTree
from dpmp.clipping._joint_sums import JointSum, ReleasedMetrics, contribution


class Released(NamedTuple):
    """The noisy values that one step releases.

    Attributes:
      noisy_grads: the averaged clipped gradient, with noise.
      num_overflows: the noisy number of examples whose gradient norm is not finite;
        None if these are not counted.
      metrics: the noisy means over examples, by name.
    """

    noisy_grads: PyTree
    num_overflows: Any
    metrics: dict[str, jax.Array]


def split(
    noisy: PyTree,
    l2_norm_bound: float,
    expected_batch_size: float,
    metrics: ReleasedMetrics | None,
) -> Released:
    """Splits a noisy output of `clipped_grad`, which may be a `JointSum`."""
    if not isinstance(noisy, JointSum):
        return Released(noisy, None, {})
    count, means = noisy.num_overflows, {}
    if count is not None:
        count = in_examples(count, l2_norm_bound)
    if metrics is not None:
        means = _means(metrics, noisy, l2_norm_bound, expected_batch_size)
    return Released(noisy.sum_of_clipped_grads, count, means)


def in_examples(noisy_overflows: jax.Array, l2_norm_bound: float) -> jax.Array:
    """Converts a noisy count of overflows to a number of examples."""
    return noisy_overflows / contribution(l2_norm_bound)


def _means(
    metrics: ReleasedMetrics,
    noisy: JointSum,
    l2_norm_bound: float,
    expected_batch_size: float,
) -> dict[str, jax.Array]:
    """The noisy means of the metrics, by name.

    The sums are divided by the expected batch size; the true batch size is sensitive.
    """
    l2_norm_bound = as_real(l2_norm_bound)
    expected_batch_size = as_real(expected_batch_size)
    units = {"loss": metrics.largest_loss or 1.0, "clipped": 1.0}
    means = {
        name: noisy.metrics[name]
        * (units[name] / metrics.largest_of_one(l2_norm_bound) / expected_batch_size)
        for name in metrics.paid
    }
    if metrics.fraction_overflowed:
        count = in_examples(noisy.num_overflows, l2_norm_bound)
        means["overflowed"] = count / expected_batch_size
    return means
