"""What a policy makes of a loss and its gradient on data, next to float32."""

import collections
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpmp._typing import PyTree
from dpmp.engines import _scaled_loss
from dpmp.precision import Policy

# Gradients of other batches are larger, and so is what is between loss and parameters.
_HEADROOM = 16

# A loss scale is the first cotangent, which float16 has to hold.
_LARGEST_SCALE = 2.0**15
_SMALLEST_SCALE = 2.0**-15

Exponents = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Shares:
    """What rounding to a dtype makes of float32 numbers that are not zero.

    Attributes:
      num_entries: how many there are.
      zero: share of those that become zero.
      subnormal: share of those that lose bits, being too small for the dtype.
      overflow: share of those that become infinite.
    """

    num_entries: int
    zero: float
    subnormal: float
    overflow: float

    @property
    def lost(self) -> float:
        """Share of those that become zero or lose bits."""
        return self.zero + self.subnormal


@dataclass(frozen=True)
class GradientComparison:
    """A gradient of the policy, and the one in float32.

    Attributes:
      path: of the parameter; "" for all of them.
      num_entries: of the parameter.
      cosine: of the angle between the two; 1.0 if both are zero.
      norm_ratio: the norm of the policy's over that of the other.
      not_finite: the share of entries of the policy's that are infinite or NaN.
      rounded: the float32 gradient, scaled and rounded to the dtype of the other.
    """

    path: str
    num_entries: int
    cosine: float
    norm_ratio: float
    not_finite: float
    rounded: Shares


@dataclass(frozen=True)
class Comparison:
    """What a policy computes at a loss scale, next to float32; nothing has noise.

    Attributes:
      loss_scale: what the policy's loss was multiplied by before differentiation.
      loss: with the policy.
      float32_loss: without.
      total: of the gradient with respect to all parameters.
      parameters: of each, the smallest cosine first.
      exponents: how many entries of the policy's gradient, unscaled, are from 2^k to
        2^(k+1) in size, for each k; zeros are left out.
      float32_exponents: the same without the policy.
    """

    loss_scale: float
    loss: float
    float32_loss: float
    total: GradientComparison
    parameters: tuple[GradientComparison, ...]
    exponents: Exponents
    float32_exponents: Exponents

    @property
    def relative_difference(self) -> float:
        """Of the losses."""
        if self.loss == self.float32_loss:
            return 0.0
        size = abs(self.float32_loss)
        return abs(self.loss - self.float32_loss) / size if size else math.inf


class _Run(NamedTuple):
    """A loss, and its gradient as it was computed: the scaled one."""

    loss: float
    grads: list[np.ndarray]


def compare(
    fun: Callable[..., jax.Array],
    reference_fun: Callable[..., jax.Array],
    args: Sequence[PyTree],
    policy: Policy,
    scale: float,
) -> tuple[Comparison, Comparison]:
    """What a policy computes at a loss scale, and at the one that suits it best.

    Args:
      fun: gives the loss of its arguments, parameters first.
      reference_fun: gives the one to compare with, in float32.
      args: arrays.
      policy: casts arguments, for the one gradient.
      scale: a power of two.
    """
    paths = [path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(args[0])]
    reference = _runner(reference_fun, args, Policy.from_name("float32"))(1.0)
    run = _runner(fun, args, policy)

    first = run(scale)
    given = _compared(first, reference, scale, paths)
    scale = best_scale(reference.grads, [x.dtype for x in first.grads])
    while True:
        is_known = scale == given.loss_scale
        best = given if is_known else _compared(run(scale), reference, scale, paths)
        if not best.total.not_finite or scale <= _SMALLEST_SCALE:
            return given, best
        scale /= 2


def path_of(path: Any) -> str:
    """As the expressions in `Policy.float32_paths` see it."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _runner(
    fun: Callable[..., jax.Array], args: Sequence[PyTree], policy: Policy
) -> Callable[[float], _Run]:
    """Loss and gradient under a policy, as a function of the loss scale."""
    fun = policy.in_product_precision(fun)
    compute_args = policy.cast_to_compute(args[0]), *map(policy.cast_inputs, args[1:])

    @jax.jit
    def value_and_grads(scale: jax.Array, *args: PyTree) -> tuple[jax.Array, PyTree]:
        loss_fn = _scaled_loss.scaled(lambda *args: (fun(*args), None), scale)
        (_, (_, loss, _)), grads = jax.value_and_grad(loss_fn, has_aux=True)(*args)
        return loss, grads

    def run(scale: float) -> _Run:
        loss, grads = value_and_grads(jnp.float32(scale), *compute_args)
        return _Run(float(loss), [np.asarray(x) for x in jax.tree.leaves(grads)])

    return run


def best_scale(grads: Sequence[np.ndarray], dtypes: Sequence[Any]) -> float:
    """The smallest power of two with which the fewest entries are zero or subnormal.

    Args:
      grads: in float32, not scaled.
      dtypes: that they are to be rounded to.
    """
    largest = max((np.max(np.abs(x), initial=0.0) for x in grads), default=0.0)
    limit = min(float(jnp.finfo(dtype).max) for dtype in dtypes) / _HEADROOM
    scale, best, fewest = _LARGEST_SCALE, _SMALLEST_SCALE, math.inf
    while scale >= _SMALLEST_SCALE:
        if largest * scale <= limit:
            rounded = [_shares(x, d, scale) for x, d in zip(grads, dtypes, strict=True)]
            lost = sum(round(x.lost * x.num_entries) for x in rounded)
            if lost > fewest:
                break
            # Larger ones do as well, but to go up for nothing is to risk an overflow.
            if lost < fewest or scale >= 1:
                best, fewest = scale, lost
        scale /= 2
    return best


def _shares(x: np.ndarray, dtype: Any, scale: float) -> Shares:
    """What becomes of the entries of a float32 array that are not zero."""
    sizes = np.abs(x[x != 0]).astype(np.float32) * np.float32(scale)
    with np.errstate(over="ignore", under="ignore"):
        rounded = sizes.astype(dtype).astype(np.float32)
    smallest = float(jnp.finfo(dtype).smallest_normal)
    count = max(1, sizes.size)
    return Shares(
        sizes.size,
        np.count_nonzero(rounded == 0) / count,
        np.count_nonzero((rounded != 0) & (rounded < smallest)) / count,
        np.count_nonzero(~np.isfinite(rounded)) / count,
    )


def _together(parts: Iterable[Shares]) -> Shares:
    """The shares of all entries."""
    parts = list(parts)
    count = sum(x.num_entries for x in parts)

    def share(name: str) -> float:
        total = sum(getattr(x, name) * x.num_entries for x in parts)
        return total / max(1, count)

    return Shares(count, share("zero"), share("subnormal"), share("overflow"))


class _Products(NamedTuple):
    """Inner products of the two gradients with each other and with themselves."""

    both: float
    own: float
    reference: float


def _compared(
    run: _Run, reference: _Run, scale: float, paths: Sequence[str]
) -> Comparison:
    grads = [x.astype(np.float32) / np.float32(scale) for x in run.grads]
    wide = reference.grads
    products = [_products(x, y) for x, y in zip(grads, wide, strict=True)]
    bad = [int(np.count_nonzero(~np.isfinite(x))) for x in grads]
    shares = [_shares(y, x.dtype, scale) for x, y in zip(run.grads, wide, strict=True)]
    parts = [
        _gradient_comparison(path, x.size, product, count, share)
        for path, x, product, count, share in zip(
            paths, grads, products, bad, shares, strict=True
        )
    ]
    total = _Products(*map(sum, zip(*products, strict=True)))
    size = sum(x.size for x in grads)
    return Comparison(
        scale,
        run.loss,
        reference.loss,
        _gradient_comparison("", size, total, sum(bad), _together(shares)),
        # What is not a number is worst.
        tuple(sorted(parts, key=lambda x: (x.cosine == x.cosine, x.cosine))),
        _exponents(grads),
        _exponents(wide),
    )


def _products(x: np.ndarray, y: np.ndarray) -> _Products:
    a, b = x.astype(np.float64).ravel(), y.astype(np.float64).ravel()
    with np.errstate(invalid="ignore", over="ignore"):
        return _Products(float(a @ b), float(a @ a), float(b @ b))


def _gradient_comparison(
    path: str, size: int, products: _Products, num_bad: int, rounded: Shares
) -> GradientComparison:
    both, own, reference = products
    is_zero = own == 0 == reference
    with np.errstate(all="ignore"):
        cosine = float(np.float64(both) / np.sqrt(np.float64(own) * reference))
        ratio = float(np.sqrt(np.float64(own) / reference))
    if is_zero:
        cosine = ratio = 1.0
    elif own == 0 or reference == 0:
        cosine = 0.0
    return GradientComparison(
        path, size, cosine, ratio, num_bad / max(1, size), rounded
    )


def _exponents(grads: Iterable[np.ndarray]) -> Exponents:
    """How many entries there are of each size, in powers of two."""
    counts: collections.Counter[int] = collections.Counter()
    for x in grads:
        _, exponents = np.frexp(x[np.isfinite(x) & (x != 0)])
        found, times = np.unique(exponents - 1, return_counts=True)
        counts.update(dict(zip(found.tolist(), times.tolist(), strict=True)))
    return tuple(sorted(counts.items()))
