"""Automatic clipping, which divides each gradient by its norm."""

from dataclasses import dataclass

from dpmp import _validate


@dataclass(frozen=True, kw_only=True)
class AutomaticClipping:
    """Divides the gradient of each example by its norm plus a small number (AUTO-S).

    Pass it as `l2_clip_norm`. The contribution of an example with gradient g is then

        g / (norm(g) + stability),

    so that there is no clip norm to tune. With a clip norm C, the contribution would be
    g * min(1, C / norm(g)), which for a large gradient is C times as large. The
    argument `rescale_to_unit_norm` makes no difference.

    >>> grad_fn = clipped_grad(
    ...     lambda w, x: jnp.sum(w * x), l2_clip_norm=AutomaticClipping(stability=1.0)
    ... )
    >>> print(f"{grad_fn(0.5, jnp.array([4.0])):.1f} {grad_fn.sensitivity()}")
    0.8 1.0

    Guarantees:
      The norm of a contribution is below 1, before the division by `normalize_by`. This
      holds for the computed numbers as it does for a clip norm of 1, with every
      arithmetic and both engines. "bounded" sums divide by an upper bound on the norm.
      A gradient of zero contributes zero, and so does one that is not finite.

    Attributes:
      stability: the small number, from 1e-15 to 1e15. A gradient that is much smaller
        contributes little. A gradient that is much larger contributes its direction
        alone. Without the small number, training may fail to converge, because small
        and large gradients would count the same.

    References:
      [Bu et al.: Automatic clipping: differentially private deep learning made easier
      and stronger, section 3](https://arxiv.org/abs/2206.07136)
    """

    stability: float = 0.01

    def __post_init__(self):
        stability = _validate.positive(
            stability=self.stability, fix="Use 0.01, for example."
        )
        _validate.require(
            1e-15 <= stability <= 1e15,
            "stability must be from 1e-15 to 1e15",
            stability=stability,
            fix="Use 0.01, for example.",
        )
        object.__setattr__(self, "stability", stability)
