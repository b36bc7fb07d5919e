"""What goes into the noise, and the gradients, overflows and metrics that come out."""

from typing import Any, NamedTuple

import jax

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.clipping._joint_sums import JointSum, ReleasedMetrics, contribution
from dpmp.numerics._sums import num_entries


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


def check_num_entries(total: PyTree, num_parameters: int) -> None:
    """Raises ValueError if a gradient has more entries than are accounted for."""
    grads = total.sum_of_clipped_grads if isinstance(total, JointSum) else total
    _validate.require(
        num_entries(grads) <= num_parameters,
        "the gradient must have at most num_parameters entries",
        num_parameters=num_parameters,
        entries=num_entries(grads),
        fix=f"Use DPSGD(num_parameters={num_entries(grads)}).",
    )


def split(
    noisy: PyTree,
    l2_norm_bound: float,
    expected_batch_size: float,
    metrics: ReleasedMetrics | None,
) -> Released:
    """Splits a noisy output of `clipped_grad`, which may be a `JointSum`."""
    if not isinstance(noisy, JointSum):
        return Released(noisy, None, {})
    count, means = None, {}
    if noisy.num_overflows is not None:
        count = in_examples(noisy.num_overflows, l2_norm_bound)
    # Sums are divided by the expected batch size, since the true size is sensitive.
    if metrics is not None:
        largest = metrics.largest_of_one(l2_norm_bound)
        units = {"loss": metrics.largest_loss or 1.0, "clipped": 1.0}
        means = {
            name: noisy.metrics[name] * (units[name] / largest / expected_batch_size)
            for name in metrics.paid
        }
        if count is not None and metrics.fraction_overflowed:
            means["overflowed"] = count / expected_batch_size
    return Released(noisy.sum_of_clipped_grads, count, means)


def in_examples(noisy_overflows: jax.Array, l2_norm_bound: float) -> jax.Array:
    """Converts a noisy count of overflows to a number of examples."""
    return noisy_overflows / contribution(l2_norm_bound)
