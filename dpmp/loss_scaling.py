"""Loss scales keep gradients within the range of float16.

A float16 number below 6e-8 becomes zero, and one above 65504 becomes infinite. So the
loss of each example is multiplied by a scale before it is differentiated. The clip
coefficient is then divided by the scale, in float32.

Scales are powers of two from 2^-40 to 2^40, which do not round. Their squares and the
inverses of these are float32 numbers too, so that a compiler may divide twice by a
scale or once by its square.

A scale is a constant, a function of the example alone (`by_loss`), or it follows the
gradients of all examples (`DynamicScale`). The unscaled gradient and the guarantee are
the same as without a scale. An example whose gradient overflows contributes zero. Other
libraries skip a step, or lower the common scale, after an overflow. That would show
everyone that some example overflowed. So a `DynamicScale` changes only with a noisy
count of the overflows (`dpmp/clipping/_joint_sums.py`).

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
from dpmp._validate import as_real

__all__ = ["DynamicScale", "LossScale", "ScaleState", "ScaledLoss", "by_loss", "check"]

LossScale: TypeAlias = float | jax.Array | Callable[[jax.Array], jax.Array]

# The largest scale; the smallest scale is its inverse.
LARGEST = 2.0**40


def by_loss(
    target: float = 2.0**10, *, largest: float = 2.0**15
) -> Callable[[jax.Array], jax.Array]:
    """Makes a function that scales the loss of each example to about `target`.

    >>> scale = by_loss(1024)
    >>> print([float(scale(jnp.float32(loss))) for loss in (3.0, 0.1, 1e-6)])
    [256.0, 8192.0, 32768.0]

    Args:
      target: the scaled loss, up to a factor of two.
      largest: the largest scale. It matters for losses close to zero, whose gradients
        need not be as small. If the model returns a float16 loss, the scale must be a
        float16 number too.

    Returns:
      A function from the loss of an example to its scale, the largest power of two from
      2^-40 to `largest` that scales the loss to at most `target`.
    """
    target = _validate.positive(target=target, fix="Use 1024.0, for example.")
    largest = as_real(largest)
    if not (_validate.is_real(largest) and 1 / LARGEST <= largest <= LARGEST):
        _validate.fail(
            "the largest scale must be from 2^-40 to 2^40. Use 2.0**15, for example.",
            largest=largest,
        )

    def scale(loss: jax.Array) -> jax.Array:
        # frexp and ldexp work on the bits of the float: the scale is a power of two.
        ratio = target / jnp.maximum(jnp.abs(loss.astype(jnp.float32)), 1e-30)
        _, exponent = jnp.frexp(jnp.clip(ratio, 1 / LARGEST, largest))
        return jnp.ldexp(jnp.float32(1), exponent - 1)

    return scale


class ScaleState(NamedTuple):
    """The state of a `DynamicScale`; it is released.

    Attributes:
      scale: the scale of the next step, a float32 power of two.
      steps_without_overflow: int32, counts the steps since the scale last moved.
    """

    scale: jax.Array
    steps_without_overflow: jax.Array


@dataclass(frozen=True, kw_only=True)
class DynamicScale:
    """A scale that all examples share and that follows their gradients.

    An example overflows if the norm of its gradient is not finite. The scale halves
    after a step with many overflows, and doubles after `growth_interval` steps without
    many. Every step counts, with or without overflows.

    >>> dynamic = DynamicScale(initial=1024.0, growth_interval=2)
    >>> state = dynamic.update(dynamic.init(), jnp.float32(17.2), stddev=1.0)
    >>> float(state.scale)
    512.0

    Guarantees:
      The scale depends on the data only through noisy counts of overflows, whose
      privacy is accounted for.

    Attributes:
      initial: the first scale, a power of two.
      growth_interval: the number of steps before the scale doubles.
      tolerated: a step has many overflows if the noisy count is more than this number
        plus three standard deviations of the noise.
    """

    initial: float = 2.0**15
    growth_interval: int = 100
    tolerated: float = 1.0

    def __post_init__(self):
        _validate.fields(
            self,
            initial=lambda initial: as_real(initial),
            growth_interval=_validate.positive_integer,
            tolerated=_validate.nonnegative,
        )
        check(self.initial)

    def init(self) -> ScaleState:
        """The state before the first step."""
        return ScaleState(jnp.float32(self.initial), jnp.zeros((), jnp.int32))

    def update(
        self, state: ScaleState, noisy_count: jax.Array, *, stddev: float
    ) -> ScaleState:
        """The state after a step.

        `noisy_count` is the number of examples that overflowed, plus noise, and
        `stddev` the standard deviation of this noise.
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


@dataclass(frozen=True)
class ScaledLoss:
    """A loss, and a scale by which `clipped_grad` multiplies the loss.

    >>> loss_fn = ScaledLoss(lambda w, x: jnp.sum(w * x), 1024.0)
    >>> print(clipped_grad(loss_fn, l2_clip_norm=1.0)(2.0, jnp.array([0.5, 0.25])))
    0.75

    Attributes:
      fun: the loss. A call of this object calls it, without the scale.
      loss_scale: a power of two, or a function from the loss of an example to a power
        of two, such as `by_loss()`. A scale that is traced or comes from a function is
        rounded down to a power of two from 2^-40 to 2^40. An example whose scale is
        negative or not finite contributes zero.
    """

    fun: Callable[..., Any]
    loss_scale: LossScale

    def __post_init__(self):
        _validate.function(fun=self.fun)
        object.__setattr__(self, "loss_scale", as_real(self.loss_scale))
        check(self.loss_scale)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the unscaled loss."""
        return self.fun(*args, **kwargs)


def check(loss_scale: LossScale) -> None:
    """Raises ValueError for an invalid scale."""
    if isinstance(loss_scale, DynamicScale):
        _validate.fail(
            "a dynamic loss_scale must be updated with noisy counts of overflows. "
            "Pass it to DPTrainer, or its state's scale to ScaledLoss.",
            loss_scale=loss_scale,
        )
    if isinstance(loss_scale, jax.Array):
        if loss_scale.shape != () or not jnp.issubdtype(loss_scale.dtype, jnp.floating):
            _validate.fail(
                "an array as loss_scale must be a float scalar. For one scale per "
                "example, use dpmp.loss_scaling.by_loss().",
                shape=loss_scale.shape,
                dtype=loss_scale.dtype,
            )
    elif callable(loss_scale):
        if loss_scale in (by_loss, DynamicScale):
            _validate.fail(
                "loss_scale must be a scale, and not what makes one. Call it: "
                "by_loss(), or DynamicScale().",
                loss_scale=getattr(loss_scale, "__name__", ""),
            )
        _validate.function("loss", loss_scale=loss_scale)
    elif not _validate.is_scale(loss_scale):
        _validate.fail(
            "loss_scale must be a power of two from 2^-40 to 2^40. Use 2.0**10, for "
            "example. Other numbers would round the gradient.",
            loss_scale=loss_scale,
        )
