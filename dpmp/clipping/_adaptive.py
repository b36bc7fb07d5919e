"""A clip norm that follows a quantile of the gradient norms, learned with noise.

An example adds +s to a count if its gradient norm is at most the clip norm C, and -s if
it is above C or not finite. Padding adds 0. The count is one more coordinate of the sum
of gradients, which are clipped and divided by C: docs/proofs.md has the proof.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from dpmp import _meshes, _validate
from dpmp._validate import as_real

_positive = functools.partial(_validate.positive, fix="Leave it out for the default.")
_positive_norm = functools.partial(
    _validate.positive,
    fix="Use 1.0, for example, or a typical gradient norm of public examples.",
)


@dataclass(frozen=True, kw_only=True)
class AdaptiveClipNorm:
    """A clip norm that follows a quantile of the gradient norms during training.

    Pass it to `DPSGD` as `l2_clip_norm`. Each step releases the fraction of examples
    whose gradient norm is at most the clip norm C, with noise. The next clip norm is

        C * exp(-learning_rate * (noisy fraction - quantile)),

    so that C settles where the fraction equals the quantile. `DPTrainer` does all this.

    >>> adaptive = AdaptiveClipNorm(initial=1.0, quantile=0.5, learning_rate=0.2)
    >>> print(f"{adaptive.update(jnp.float32(1.0), jnp.float32(0.9)):.4f}")
    0.9231
    >>> print(f"{adaptive.noise_increase:.2%}")
    0.50%

    A training loop of your own passes the clip norm of each step on to the next one:

    >>> mechanism = DPSGD(
    ...     num_examples=64,
    ...     expected_batch_size=16,
    ...     iterations=3,
    ...     l2_clip_norm=adaptive,
    ...     noise_multiplier=1.0,
    ... )
    >>> privatizer = mechanism.privatizer(jax.random.key(0))
    >>> noise_state = privatizer.init(None)
    >>> clip_norm = mechanism.initial_clip_norm
    >>> for _ in range(3):
    ...     grad_fn = mechanism.clipped_grad(
    ...         lambda w, x: jnp.sum(w * x), clip_norm=clip_norm
    ...     )
    ...     mask = jnp.zeros(16, bool)
    ...     total = grad_fn(1.0, jnp.full(16, 0.1), is_padding_example=mask)
    ...     noisy, noise_state = privatizer.update(total, noise_state)
    ...     released = mechanism.split(noisy, clip_norm=clip_norm)
    ...     clip_norm = released.clip_norm
    >>> bool(clip_norm < 1.0)
    True

    Guarantees:
      The clip norm is computed from noisy values alone, and epsilon accounts for them.
      For this, the noise on the gradient is wider by `noise_increase`. The privacy
      budget is unchanged: epsilon is that of a fixed clip norm.

      With every arithmetic and both engines, the sensitivity is as certain as with a
      fixed clip norm. The fraction is that of the computed norms. "bounded" sums are
      clipped by an upper bound on the norm, so that they clip a few more examples than
      this fraction says.

    Attributes:
      initial: the clip norm of the first step. It must not depend on the private data.
      quantile: the fraction of examples that are not to be clipped.
      learning_rate: the speed. If every example is above the clip norm, a step
        multiplies it by exp(learning_rate * quantile).
      norm_share: the size of the coordinate that counts examples, over the largest norm
        of a clipped gradient. A smaller share means more noise on the fraction and less
        on the gradient.
      lowest: the clip norm never falls below this.
      highest: the clip norm never rises above this.

    References:
      [Andrew et al.: Differentially private learning with adaptive clipping, sections 2
      and 3](https://arxiv.org/abs/1905.03871)
    """

    initial: float
    quantile: float = 0.5
    learning_rate: float = 0.2
    norm_share: float = 0.1
    lowest: float = 1e-15
    highest: float = 1e15

    def __post_init__(self):
        if not isinstance(self.initial, jax.core.Tracer):
            _validate.fields(self, initial=_positive_norm)
        optional = ("quantile", "learning_rate", "norm_share", "lowest", "highest")
        _validate.fields(self, **dict.fromkeys(optional, _positive))
        if not self.quantile < 1:
            _validate.fail(
                "quantile must be below 1: a clip norm above all norms is not known. "
                "Use 0.5, for example.",
                quantile=self.quantile,
            )
        self._check_range()

    def _check_range(self) -> None:
        initial = self.initial
        if isinstance(initial, jax.core.Tracer):
            initial = self.lowest
        # In float32, because the clip norm of a step is a float32.
        norms = list(map(np.float32, (1e-15, self.lowest, initial, self.highest, 1e15)))
        if norms != sorted(norms):
            _validate.fail(
                "clip norms must satisfy 1e-15 <= lowest <= initial <= highest <= "
                "1e15. Leave lowest and highest out, or choose an initial clip norm "
                "between.",
                lowest=self.lowest,
                initial=initial,
                highest=self.highest,
            )

    def at(self, clip_norm: Any) -> "AdaptiveClipNorm":
        """A copy with another initial clip norm, which may be a traced scalar."""
        return replace(self, initial=clip_norm)

    def update(self, clip_norm: jax.Array, noisy_fraction: jax.Array) -> jax.Array:
        """The clip norm of the next step, a float32.

        `noisy_fraction` is the noisy fraction of examples whose gradient norm is at
        most `clip_norm`, the clip norm of this step.
        """
        excess = jnp.asarray(noisy_fraction, jnp.float32) - self.quantile
        factor = jnp.exp(-self.learning_rate * excess)
        new = jnp.asarray(clip_norm, jnp.float32) * factor
        return jnp.clip(new, np.float32(self.lowest), np.float32(self.highest))

    @property
    def noise_increase(self) -> float:
        """The relative increase of the noise on the gradient; 0.005 means 0.5 %."""
        return math.hypot(1, self.norm_share) - 1

    def max_coordinate(self, l2_norm_bound: float) -> float:
        """The absolute value of the number that one example adds to the count.

        `l2_norm_bound` is the largest norm of a clipped gradient.
        """
        return self.norm_share * l2_norm_bound * (1 - 2.0**-50)

    def signs(self, grad_norms: jax.Array, is_example: jax.Array) -> jax.Array:
        """For each example: 1 within the clip norm, -1 above it, and 0 for padding.

        The arguments are (B,), and `is_example` is bool.
        """
        clip_norm = jnp.asarray(_meshes.resharded(self.initial)).astype(
            grad_norms.dtype
        )
        # A norm of NaN is not within the clip norm.
        signs = jnp.where(grad_norms <= clip_norm, 1.0, -1.0)
        return jnp.where(is_example, signs, 0.0).astype(jnp.float32)

    def fraction(
        self, noisy_count: jax.Array, l2_norm_bound: float, expected_batch_size: float
    ) -> jax.Array:
        """The noisy fraction of examples within the clip norm.

        The expected batch size stands for the size of the batch, which is sensitive.
        This matters little: an equal number of examples on both sides counts as half of
        them in a batch of any size.
        """
        one = self.max_coordinate(l2_norm_bound)
        return 0.5 + noisy_count * (0.5 / one / expected_batch_size)

    def stddev(self, stddev: float) -> float:
        """The standard deviation of the noise on the fraction.

        `stddev` is that of the noise on the averaged gradient, in clip norms.
        """
        return as_real(stddev) / (2 * self.norm_share)
