"""Compares a loss and its gradient under a policy with those in float32, on data."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpmp._typing import PyTree
from dpmp.engines import _methods
from dpmp.precision import Policy

# Other batches have larger gradients, and so have values between loss and parameters.
_HEADROOM = 16

# Loss scales are 2^k for these k. The scale is the first cotangent, and float16 has to
# hold it.
_POWERS = range(15, -16, -1)

Exponents = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Shares:
    """How rounding to a dtype changes float32 numbers that are not zero.

    Attributes:
      num_entries: the number of these numbers.
      zero: the share that becomes zero.
      subnormal: the share that becomes subnormal and so loses bits.
      overflow: the share that becomes infinite.
    """

    num_entries: int
    zero: float
    subnormal: float
    overflow: float

    @property
    def lost(self) -> float:
        """The share of the numbers that become zero or lose bits."""
        return self.zero + self.subnormal


@dataclass(frozen=True)
class GradientComparison:
    """A gradient under the policy, next to the gradient in float32.

    Attributes:
      path: the path of the parameter; "" for all parameters.
      num_entries: the number of entries.
      cosine: the cosine of the angle between the two; 1.0 if both are zero.
      norm_ratio: the norm of the policy's gradient over the norm of the other.
      not_finite: the share of the policy's entries that are infinite or NaN.
      rounded: the loss of bits when the float32 gradient is scaled, and rounded to the
        dtype of the policy's gradient.
    """

    path: str
    num_entries: int
    cosine: float
    norm_ratio: float
    not_finite: float
    rounded: Shares


@dataclass(frozen=True)
class Comparison:
    """A policy at a loss scale, next to float32. None of these numbers has noise.

    Attributes:
      loss_scale: the factor of the policy's loss during differentiation.
      loss: the loss under the policy.
      float32_loss: the loss in float32.
      total: the gradient with respect to all parameters.
      parameters: the gradient of each parameter, the smallest cosine first.
      exponents: for each k, the number of entries of the policy's gradient, unscaled,
        whose size is from 2^k to 2^(k+1). Zeros are left out.
      float32_exponents: the same for the float32 gradient.
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
        """The difference of the losses, relative to the loss in float32."""
        if self.loss == self.float32_loss:
            return 0.0
        size = abs(self.float32_loss)
        return abs(self.loss - self.float32_loss) / size if size else math.inf


def power_as_code(scale: float) -> str:
    """A power of two as Python code."""
    return f"2.0**{round(math.log2(scale))}" if scale != 1 else "1"


def compare(
    fun: Callable[..., jax.Array],
    reference_fun: Callable[..., jax.Array],
    args: Sequence[PyTree],
    policy: Policy,
    scale: float,
) -> tuple[Comparison, Comparison]:
    """Compares `fun` under a policy with a function in float32, on the same arguments.

    The first comparison is at the loss scale that is given, and the second one at the
    loss scale that suits the gradient best.
    """
    paths = [path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(args[0])]
    run = _runner(fun, args, policy)
    exact_loss, exact = _runner(reference_fun, args, Policy.from_name("float32"))(1.0)

    def compared(scale: float) -> Comparison:
        loss, scaled = run(scale)
        grads = [x.astype(np.float32) / np.float32(scale) for x in scaled]
        dtypes = [x.dtype for x in scaled]
        arrays = zip(grads, exact, dtypes, strict=True)
        measures = [_measure(x, y, dtype, scale) for x, y, dtype in arrays]
        parameters = [
            _gradient_comparison(path, [x])
            for path, x in zip(paths, measures, strict=True)
        ]
        parameters.sort(key=lambda x: (not math.isnan(x.cosine), x.cosine))
        return Comparison(
            scale,
            loss,
            exact_loss,
            _gradient_comparison("", measures),
            tuple(parameters),
            _exponents(np.concatenate(grads)),
            _exponents(np.concatenate(exact)),
        )

    given = best = compared(scale)
    dtypes = [x.dtype for x in jax.tree.leaves(policy.cast_to_compute(args[0]))]
    if (scale := _best_scale(exact, dtypes)) != given.loss_scale:
        best = compared(scale)
    while best.total.not_finite and best.loss_scale > 2.0 ** _POWERS[-1]:
        best = compared(best.loss_scale / 2)
    return given, best


def cast(args: Sequence[PyTree], policy: Policy) -> tuple[PyTree, ...]:
    """The arguments that a policy gives to a function, parameters first."""
    return (policy.cast_to_compute(args[0]), *map(policy.cast_inputs, args[1:]))


def path_of(path: Any) -> str:
    """A path as the expressions in `Policy.float32_paths` see it."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _runner(
    fun: Callable[..., jax.Array], args: Sequence[PyTree], policy: Policy
) -> Callable[[float], tuple[float, list[np.ndarray]]]:
    """From a loss scale to the loss and the scaled gradient of each parameter: (n,)."""
    fun, compute_args = policy.in_product_precision(fun), cast(args, policy)

    @jax.jit
    def value_and_grads(scale: jax.Array, *args: PyTree) -> tuple[jax.Array, PyTree]:
        loss_fn = _methods.scaled(lambda *args: (fun(*args), None), scale)
        (_, (_, loss, _)), grads = jax.value_and_grad(loss_fn, has_aux=True)(*args)
        return loss, grads

    def run(scale: float) -> tuple[float, list[np.ndarray]]:
        loss, grads = value_and_grads(jnp.float32(scale), *compute_args)
        return float(loss), [np.ravel(x) for x in jax.tree.leaves(grads)]

    return run


def _best_scale(grads: Sequence[np.ndarray], dtypes: Sequence[Any]) -> float:
    """The power of two with which the fewest entries become zero or subnormal.

    If several are as good, the result is the one that is closest to 1: larger ones gain
    nothing, and risk an overflow. `grads` are in float32, and are rounded to `dtypes`.
    """
    largest = max((np.max(np.abs(x), initial=0.0) for x in grads), default=0.0)
    limit = min(float(jnp.finfo(dtype).max) for dtype in dtypes) / _HEADROOM
    # The exponents of all entries, less the smallest exponent that loses no bits.
    margins = [
        (k - int(jnp.finfo(dtype).minexp), count)
        for x, dtype in zip(grads, dtypes, strict=True)
        for k, count in _exponents(x)
    ]

    def num_lost(power: int) -> int:
        return sum(count for margin, count in margins if margin + power < 0)

    powers = [k for k in _POWERS if largest * 2.0**k <= limit] or [_POWERS[-1]]
    return 2.0 ** min(powers, key=lambda k: (num_lost(k), abs(k)))


def _measure(x: np.ndarray, exact: np.ndarray, dtype: Any, scale: float) -> list[float]:
    """Numbers that add up over parameters, as `_gradient_comparison` reads them."""
    sizes = np.abs(exact[exact != 0]) * np.float32(scale)
    with np.errstate(all="ignore"):
        rounded = sizes.astype(dtype).astype(np.float32)
        # Inner products in float64, without copies of the arrays.
        products = [
            np.einsum("i,i->", a, b, dtype=np.float64)
            for a, b in ((x, x), (x, exact), (exact, exact))
        ]
    is_zero = rounded == 0
    is_subnormal = ~is_zero & (rounded < float(jnp.finfo(dtype).smallest_normal))
    masks = ~np.isfinite(x), is_zero, is_subnormal, ~np.isfinite(rounded)
    return [x.size, sizes.size, *map(np.count_nonzero, masks), *products]


def _gradient_comparison(
    path: str, measures: Sequence[Sequence[float]]
) -> GradientComparison:
    with np.errstate(all="ignore"):
        *counts, square, product, exact_square = np.sum(measures, axis=0)
        norm, exact_norm = np.sqrt(square), np.sqrt(exact_square)
        ratio, cosine = norm / exact_norm, 0.0
        if norm == exact_norm == 0:
            ratio = cosine = 1.0
        elif norm != 0 and exact_norm != 0:
            cosine = product / (norm * exact_norm)
    size, num_nonzero, not_finite, *changed = map(int, counts)
    rounded = Shares(num_nonzero, *(x / max(1, num_nonzero) for x in changed))
    share = not_finite / max(1, size)
    return GradientComparison(path, size, float(cosine), float(ratio), share, rounded)


def _exponents(x: np.ndarray) -> Exponents:
    """The number of entries of each size, in powers of two."""
    _, exponents = np.frexp(x[np.isfinite(x) & (x != 0)])
    found, counts = np.unique(exponents - 1, return_counts=True)
    return tuple(zip(found.tolist(), counts.tolist(), strict=True))
