"""Loss scales: gradients that are neither too small for float16 nor too large.

What is below 6e-8 is zero in float16, and what is above 65504 infinite. So the loss of
an example is multiplied by a scale before it is differentiated, and the coefficient
that clips the gradient is divided by it, in float32. Scales are powers of two, which
round nothing, from 2^-40 to 2^40, whose squares and their inverses are float32 numbers
too: it does not matter whether a compiler divides by a scale twice or by its square
once. Scales that are known only when a program runs (arrays, and what functions return)
are made so there.

A scale may be known beforehand, or depend on the example alone: its gradient is what it
would have been, and the guarantee is the same. An example that overflows contributes
zero, by selection. To skip such a step, or to lower a scale that others share because
of it, would show everybody that there was such an example.

A scale that adapts to all examples moves by a count of overflows that has noise
(`dpmp/clipping/_joint_sums.py`).

References:
  Micikevicius et al.: Mixed precision training, 2018, section 3.2.
  https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling: growth and backoff.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from dpmp import _validate
from dpmp._numbers import as_real

LossScale: TypeAlias = float | jax.Array | Callable[[jax.Array], jax.Array]

# The largest scale; its inverse is the smallest one.
LARGEST = 2.0**40


def by_loss(
    target: float = 2.0**10, *, largest: float = 2.0**15
) -> Callable[[jax.Array], jax.Array]:
    """A scale for each example, with which its loss is about `target`.

    >>> scale = by_loss(1024)
    >>> print([float(scale(jnp.float32(loss))) for loss in (3.0, 0.1, 1e-6)])
    [256.0, 8192.0, 32768.0]

    Args:
      target: what losses are scaled to, but for a factor of two.
      largest: scale. The gradients of losses close to zero need not be small: those of
        squares are as their roots. And where a model returns a float16 loss, the scale
        itself has to be one.

    Returns:
      A function from the loss of an example to the largest power of two that scales it
      to at most `target`, and from 2^-40 to `largest`.

    Raises:
      ValueError: for a target that is not positive, and a `largest` out of range.
    """
    target = _validate.positive(target=target, fix="Use 1024.0, for example.")
    largest = as_real(largest)
    _validate.require(
        _validate.is_real(largest) and 1 / LARGEST <= largest <= LARGEST,
        "the largest scale must be from 2^-40 to 2^40",
        largest=largest,
        fix="Use 2.0**15, for example.",
    )

    def scale(loss: jax.Array) -> jax.Array:
        # From the bits of the float, so that it is a power of two and nothing else.
        ratio = target / jnp.maximum(jnp.abs(loss.astype(jnp.float32)), 1e-30)
        _, exponent = jnp.frexp(jnp.clip(ratio, 1 / LARGEST, largest))
        return jnp.ldexp(jnp.float32(1), exponent - 1)

    return scale


class ScaleState(NamedTuple):
    """What the next scale depends on; released.

    Attributes:
      scale: float32, a power of two.
      steps_without_overflow: int32, since the scale last moved.
    """

    scale: jax.Array
    steps_without_overflow: jax.Array


@dataclass(frozen=True, kw_only=True)
class DynamicScale:
    """A scale that all examples share, and that follows their gradients.

    After `growth_interval` steps without many overflows it doubles, after a step with
    many it halves, and that step counts as any other.

    >>> dynamic = DynamicScale(initial=1024.0, growth_interval=2)
    >>> state = dynamic.init()
    >>> scales = []
    >>> for noisy_count in (0.3, 17.0, -1.2, 0.8):
    ...     state = dynamic.update(state, jnp.float32(noisy_count), stddev=1.0)
    ...     scales.append(float(state.scale))
    >>> print(scales)
    [1024.0, 512.0, 512.0, 1024.0]

    Guarantees:
      It is a function of noisy counts, and so post-processing of what is accounted for.

    Attributes:
      initial: the first scale, a power of two.
      growth_interval: steps without overflow before it doubles.
      tolerated: how many examples of a batch may overflow, besides what noise alone may
        look like (three standard deviations).
    """

    initial: float = 2.0**15
    growth_interval: int = 100
    tolerated: float = 1.0

    def __post_init__(self):
        checked = {
            "initial": as_real(self.initial),
            "growth_interval": _validate.positive_integer(
                growth_interval=self.growth_interval, fix="Use 100, for example."
            ),
            "tolerated": _validate.nonnegative(
                tolerated=self.tolerated, fix="Use 1.0, for example."
            ),
        }
        check(checked["initial"])
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def init(self) -> ScaleState:
        """The state before the first step."""
        return ScaleState(jnp.float32(self.initial), jnp.zeros((), jnp.int32))

    def update(
        self, state: ScaleState, noisy_count: jax.Array, *, stddev: float
    ) -> ScaleState:
        """The state after a step.

        Args:
          state: before it.
          noisy_count: of overflowing examples.
          stddev: of its noise, in examples.
        """
        stddev = as_real(stddev)
        overflowed = noisy_count > self.tolerated + 3 * stddev
        steps = jnp.where(overflowed, 0, state.steps_without_overflow + 1)
        grows = steps >= self.growth_interval
        factor = jnp.where(overflowed, 0.5, jnp.where(grows, 2.0, 1.0))
        scale = jnp.clip(state.scale * factor, 1 / LARGEST, LARGEST)
        return ScaleState(
            scale.astype(jnp.float32), jnp.where(grows, 0, steps).astype(jnp.int32)
        )


def check(loss_scale: LossScale, pre_clipping_transform: Any = None) -> None:
    """Raises ValueError for what is no scale, and where there can be none."""
    _validate.require(
        pre_clipping_transform is None,
        "pre_clipping_transform cannot be given gradients that are scaled",
        loss_scale=loss_scale,
        fix="Leave one of them out; a transform that knows of the scale may be a part "
        "of the loss.",
    )
    _validate.require(
        not isinstance(loss_scale, DynamicScale),
        "a dynamic loss_scale has to be updated by noisy counts",
        loss_scale=loss_scale,
        fix="Give it to DPTrainer; or pass the scale of its state, and "
        "counts_overflows=True.",
    )
    if callable(loss_scale):
        return
    if isinstance(loss_scale, jax.Array):
        _validate.require(
            loss_scale.shape == () and jnp.issubdtype(loss_scale.dtype, jnp.floating),
            "an array as loss_scale must be a float scalar",
            shape=loss_scale.shape,
            dtype=loss_scale.dtype,
            fix="Scales for each example are functions of its loss: "
            "dpmp.loss_scaling.by_loss().",
        )
        return
    _validate.require(
        _validate.is_scale(loss_scale),
        "loss_scale must be a power of two, from 2^-40 to 2^40",
        loss_scale=loss_scale,
        fix="Use 2.0**10, for example: other numbers would round the gradient.",
    )
