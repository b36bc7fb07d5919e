"""What goes into the noise, and the gradients, overflows and metrics that come out."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.clipping._adaptive import AdaptiveClipNorm
from dpmp.clipping._joint_sums import JointSum, ReleasedMetrics, contribution
from dpmp.numerics._sums import num_entries


class Released(NamedTuple):
    """The noisy values that one step releases.

    Attributes:
      noisy_grads: the averaged clipped gradient, with noise.
      num_overflows: the noisy number of examples whose gradient norm is not finite;
        None if these are not counted.
      metrics: the noisy means over examples, by name.
      clip_norm: the clip norm of the next step, a float32; None unless it adapts.
    """

    noisy_grads: PyTree
    num_overflows: Any
    metrics: dict[str, jax.Array]
    clip_norm: jax.Array | None = None


def of_at_most(
    num_parameters: int, privatizer: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Makes a privatizer refuse gradients with more entries than are accounted for."""

    def update(updates, state, params=None):
        _check_num_entries(updates, num_parameters)
        return privatizer.update(updates, state, params)

    return optax.GradientTransformation(privatizer.init, update)


def _check_num_entries(total: PyTree, num_parameters: int) -> None:
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
    *,
    adaptive: AdaptiveClipNorm | None = None,
    clip_norm: Any = None,
) -> Released:
    """Splits a noisy output of `clipped_grad`, which may be a `JointSum`.

    `clip_norm` is that of the step, if it adapts.
    """
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
    if adaptive is not None:
        fraction = adaptive.fraction(noisy.within, l2_norm_bound, expected_batch_size)
        clip_norm = adaptive.update(clip_norm, fraction)
    return Released(noisy.sum_of_clipped_grads, count, means, clip_norm)


def times(released: Released, clip_norm: Any) -> Released:
    """Multiplies noisy gradients that are in clip norms by the clip norm."""

    def multiply(x: jax.Array) -> jax.Array:
        return x * jnp.asarray(clip_norm).astype(x.dtype)

    grads = jax.tree.map(multiply, released.noisy_grads)
    return released._replace(noisy_grads=grads)


def in_examples(noisy_overflows: jax.Array, l2_norm_bound: float) -> jax.Array:
    """Converts a noisy count of overflows to a number of examples."""
    return noisy_overflows / contribution(l2_norm_bound)
