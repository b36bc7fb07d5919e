"""Computes clip coefficients that bound the computed contributions.

The clip coefficient of an example multiplies its gradient g. For the unit roundoff u of
float32, and r roundings on the longest path to the squared norm of g, the contribution

    y = round(coef * g),    coef = round(bound / round(sqrt(squared norm)))

has a norm of at most bound * (1 + (r/2 + 3) u + O(u^2)): see docs/proofs.md. So
|y| <= l2_clip_norm if `bound` is the clip norm divided by that factor. Automatic
clipping divides by norm + stability, and the same bound holds.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from dpmp import _meshes, _validate
from dpmp._typing import PyTree
from dpmp._validate import as_real
from dpmp.numerics import UNIT_ROUNDOFF, Arithmetic, SquaredNorm, at_least_float32

# Three for the roundings in the formula of the module, one for the rounding of a
# float64 term to a float32 sum, and four to spare: for the second-order terms, and for
# hardware whose square root or division is off by a few units in the last place.
_SPARE_ROUNDINGS = 8


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
        _validate.fields(self, stability=_validate.positive)
        if not 1e-15 <= self.stability <= 1e15:
            _validate.fail(
                "stability must be from 1e-15 to 1e15. Use 0.01, for example.",
                stability=self.stability,
            )


@dataclass(frozen=True)
class ClipNorms:
    """The clip norm of each clipping group: a set of parameters that share it."""

    norms: tuple[float, ...]
    prefix: Any  # the tree structure of the norms, a prefix of that of the gradients
    rescale_to_unit_norm: bool  # whether to divide by the norm of all clip norms
    normalize_by: float  # a further divisor of the clipped gradients
    # A float32 clip norm that is known only when the program runs. The clipped
    # gradients are divided by it, so that `norms` is (1.0,).
    traced: jax.Array | None = None
    # The number that automatic clipping adds to each norm. Then `norms` is (1.0,).
    stability: float | None = None

    @classmethod
    def from_tree(
        cls, tree: PyTree, rescale_to_unit_norm: bool, normalize_by: float
    ) -> "ClipNorms":
        """Makes clip norms from a tree of numbers, or from an `AutomaticClipping`."""
        rescale_to_unit_norm = _validate.boolean(
            rescale_to_unit_norm=rescale_to_unit_norm,
            fix="Use True to divide the clipped gradients by the clip norm.",
        )
        stability = None
        if isinstance(tree, AutomaticClipping):
            stability, tree = tree.stability, 1.0
        norms, prefix = jax.tree.flatten(jax.tree.map(as_real, tree))
        traced = None
        if any(isinstance(x, jax.core.Tracer) for x in norms):
            _check_traced(norms, rescale_to_unit_norm)
            traced, norms = norms[0].astype(jnp.float32), [1.0]
        _check(norms, rescale_to_unit_norm)
        normalize_by = _validate.positive(
            normalize_by=normalize_by, fix="Use 1.0, or the expected batch size."
        )
        total = math.hypot(*norms)
        scales = *norms, normalize_by, total / normalize_by
        if not all(x in (0, math.inf) or 1e-15 <= x <= 1e15 for x in scales):
            _validate.fail(
                "clip norms and normalize_by must be from 1e-15 to 1e15. Rescale the "
                "loss: float32 cannot handle other sizes.",
                l2_clip_norm=total,
                normalize_by=normalize_by,
            )
        return cls(
            tuple(norms), prefix, rescale_to_unit_norm, normalize_by, traced, stability
        )

    @functools.cached_property
    def l2_norm_bound(self) -> float:
        """The largest norm of a contribution, over all groups together."""
        total = 1.0 if self.rescale_to_unit_norm else math.hypot(*self.norms)
        return total / self.normalize_by

    def fit(self, arithmetic: Arithmetic, nan_safe: bool = True) -> Arithmetic:
        """Adapts an arithmetic to sums of gradients that are clipped to these norms."""
        bounds = [bound for bound, _ in self._targets_of_numbers]
        l2_norm_bound = self.l2_norm_bound if nan_safe else math.inf
        return arithmetic.for_clip_norms(bounds, l2_norm_bound)

    def check_prefix_of(self, tree: PyTree) -> None:
        """Raises ValueError unless each clip norm clips a non-empty part of `tree`."""
        try:
            groups = self.prefix.flatten_up_to(tree)
        except ValueError as error:
            _validate.fail(
                "l2_clip_norm must be a number or a prefix of the clipped tree",
                l2_clip_norm=self.prefix,
                clipped=jax.tree.structure(tree),
                fix=f"Make the trees agree. They differ: {error}.",
            )
        if not all(jax.tree.leaves(group) for group in groups):
            _validate.fail(
                "every clip norm must clip at least one array. Remove the clip norms "
                "or the argnums that have no array.",
                clipped=jax.tree.structure(tree),
            )

    @property
    def targets(self) -> list[tuple[float, Any]]:
        """The target norm and the largest coefficient of each group.

        With a traced clip norm, the coefficient is an array. It is NaN if that clip
        norm is not from 1e-15 to 1e15, and then every contribution is zero.
        """
        if self.traced is None:
            return self._targets_of_numbers
        ((bound, cap),) = self._targets_of_numbers
        clip_norm = _meshes.resharded(self.traced)
        is_valid = (clip_norm >= 1e-15) & (clip_norm <= 1e15)
        return [(bound, jnp.where(is_valid, cap / clip_norm, jnp.nan))]

    @property
    def _targets_of_numbers(self) -> list[tuple[float, float]]:
        if self.stability is not None:
            return [(1 / self.normalize_by, math.inf)]
        total = math.hypot(*self.norms)
        divisor = self.normalize_by * (total if self.rescale_to_unit_norm else 1.0)
        if divisor == 0:  # in the limit of small clip norms, only directions are left
            share = 1 / math.sqrt(len(self.norms)) / self.normalize_by
            return [(share, math.inf)] * len(self.norms)
        return [(norm / divisor, 1 / divisor) for norm in self.norms]


def coefficients(
    targets: list[tuple[float, Any]],
    norms: list[SquaredNorm],
    stability: float | None = None,
) -> list[jax.Array]:
    """For each group, (B,): the smaller of target / norm and the largest coefficient.

    With a `stability`, it is target / (norm + stability), without an upper limit.
    """
    coefs = []
    for (bound, cap), norm in zip(targets, norms, strict=True):
        shrinkage = 1 - (norm.roundings / 2 + _SPARE_ROUNDINGS) * UNIT_ROUNDOFF
        target = _round_down(bound * shrinkage).astype(norm.value.dtype)
        cap = _round_down(cap).astype(norm.value.dtype)
        largest = norm.value if norm.bound is None else norm.bound
        largest += norm.underflow
        if stability is None:
            coefs.append(_coefficient(target, cap, largest))
        else:
            coefs.append(_automatic_coefficient(target, largest, stability))
    return coefs


def are_clipped(targets: list[tuple[float, Any]], coefs: list[jax.Array]) -> jax.Array:
    """Whether each example is scaled down in any group, (B,) bool."""
    below = [
        coef < _round_down(cap).astype(coef.dtype)
        for (_, cap), coef in zip(targets, coefs, strict=True)
    ]
    return functools.reduce(jnp.logical_or, below)


# Compiled even outside of `jax.jit`, so that the bits are the same: compiled code
# rounds a division by a square root differently from the two operations in turn.
@jax.jit
def _coefficient(bound: Any, cap: Any, squared_norm: jax.Array) -> jax.Array:
    return jnp.minimum(cap, bound / jnp.sqrt(squared_norm))


@jax.jit
def _automatic_coefficient(
    bound: Any, squared_norm: jax.Array, stability: Any
) -> jax.Array:
    return bound / (jnp.sqrt(squared_norm) + stability)


def _round_down(x: Any) -> Any:
    """The largest float32 that is at most `x`; an array is returned unchanged."""
    # An array is the largest coefficient for a traced clip norm. Its rounding does no
    # harm: it keeps gradients from being scaled up, and the target norm, a number,
    # bounds the norm of the result.
    if isinstance(x, jax.Array):
        return x
    with np.errstate(over="ignore"):
        rounded = np.float32(x)
    return np.nextafter(rounded, np.float32(-np.inf)) if float(rounded) > x else rounded


def global_norm(norms: list[SquaredNorm]) -> jax.Array:
    """The (B,) computed norms of the gradients, over all groups together."""
    dtype = at_least_float32(*(norm.value.dtype for norm in norms))
    return jnp.sqrt(sum(norm.value.astype(dtype) for norm in norms))


def _check(norms: list[Any], rescale_to_unit_norm: bool) -> None:
    """Raises ValueError for invalid clip norms, and for those that lose a whole group.

    Such a run would train on noise alone, without any error. The exception is a
    rescaled clip norm of 0: in this limit, gradients are divided by their norms.
    """
    if not norms:
        _validate.fail(
            "l2_clip_norm must hold at least one number. Pass a number, or a tree of "
            "numbers that is a prefix of the gradient.",
            l2_clip_norm=norms,
        )
    if not all(_validate.is_real(norm) and norm >= 0 for norm in norms):
        _validate.fail(
            "every l2_clip_norm must be a number above 0 (infinity included). Pass "
            "numbers: a clip norm is public and known before tracing.",
            l2_clip_norm=norms,
        )
    if not all(norms) and (not rescale_to_unit_norm or any(norms)):
        _validate.fail(
            "every l2_clip_norm must be a number above 0, since a clip norm of 0 "
            "makes every gradient zero",
            l2_clip_norm=norms,
            fix="Use 1.0, for example, or a typical gradient norm of public examples. "
            "To freeze parameters, leave them out of what is differentiated.",
        )
    if rescale_to_unit_norm and any(map(math.isinf, norms)):
        _validate.fail(
            "every l2_clip_norm must be finite with rescale_to_unit_norm, which "
            "divides by it. Pass a finite clip norm, or leave out "
            "rescale_to_unit_norm.",
            l2_clip_norm=norms,
        )


def _check_traced(norms: list[Any], rescale_to_unit_norm: bool) -> None:
    is_float = all(jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in norms)
    if len(norms) != 1 or not is_float or jnp.shape(norms[0]) != ():
        _validate.fail(
            "a traced l2_clip_norm must be one float scalar for all parameters. Pass "
            "Python numbers for several clip norms.",
            l2_clip_norm=norms,
        )
    if not rescale_to_unit_norm:
        _validate.fail(
            "a traced l2_clip_norm needs a sensitivity that does not depend on it. "
            "Set rescale_to_unit_norm=True, which divides the clipped gradients by "
            "the clip norm, or pass a Python number.",
            rescale_to_unit_norm=rescale_to_unit_norm,
        )
