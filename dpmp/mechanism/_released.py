"""What a step releases: noisy gradients, a noisy count of overflows, noisy metrics."""

from typing import Any, NamedTuple

import jax

from dpmp._numbers import as_real
from dpmp._typing import PyTree
from dpmp.clipping._joint_sums import JointSum, ReleasedMetrics, contribution


class Released(NamedTuple):
    """What a `JointSum` is after the noise.

    Attributes:
      noisy_grads: the sum of clipped gradients.
      num_overflows: of examples; None if they are not counted.
      metrics: means over examples, by name.
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
    """What `join` made, after the noise."""
    if not isinstance(noisy, JointSum):
        return Released(noisy, None, {})
    count, means = noisy.num_overflows, {}
    if count is not None:
        count = in_examples(count, l2_norm_bound)
    if metrics is not None:
        means = _means(metrics, noisy, l2_norm_bound, expected_batch_size)
    return Released(noisy.sum_of_clipped_grads, count, means)


def in_examples(noisy_overflows: jax.Array, l2_norm_bound: float) -> jax.Array:
    """A count of overflows with noise, as a number of examples."""
    return noisy_overflows / contribution(l2_norm_bound)


def _means(
    metrics: ReleasedMetrics,
    noisy: JointSum,
    l2_norm_bound: float,
    expected_batch_size: float,
) -> dict[str, jax.Array]:
    """The metrics by name.

    Means are taken over the expected batch size; that of a batch is sensitive.
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
