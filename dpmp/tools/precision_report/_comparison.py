"""Compares a loss and its gradient under a policy with those in float32, on data."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from dpmp._typing import PyTree
from dpmp.engines import scaled
from dpmp.precision import Policy, name_of


@dataclass(frozen=True)
class GradientComparison:
    """A gradient under the policy, next to the gradient in float32.

    The last three numbers are about the float32 gradient, when it is scaled and rounded
    to the dtype of the policy's gradient. They are shares of its nonzero entries.

    Attributes:
      path: the path of the parameter; "" for all parameters.
      num_entries: the number of entries.
      cosine: the cosine of the angle between the two; 1.0 if both are zero.
      norm_ratio: the norm of the policy's gradient over that of the float32 gradient.
      not_finite: the share of the policy's entries that are infinite or NaN.
      zero: the share that becomes zero.
      subnormal: the share that becomes subnormal and so loses bits.
      overflow: the share that becomes infinite.
    """

    path: str
    num_entries: int
    cosine: float
    norm_ratio: float
    not_finite: float
    zero: float
    subnormal: float
    overflow: float

    @property
    def lost(self) -> float:
        """The share of nonzero entries that become zero or lose bits."""
        return self.zero + self.subnormal


@dataclass(frozen=True)
class Comparison:
    """A policy at a loss scale, next to float32. None of these numbers has noise.

    Attributes:
      loss_scale: the factor of the policy's loss during differentiation.
      loss: the loss under the policy.
      float32_loss: the loss in float32.
      total: the gradient with respect to all parameters.
      parameters: the gradient of each parameter, the smallest cosine first.
    """

    loss_scale: float
    loss: float
    float32_loss: float
    total: GradientComparison
    parameters: tuple[GradientComparison, ...]

    @property
    def relative_difference(self) -> float:
        """The difference of the losses, relative to the loss in float32."""
        if self.loss == self.float32_loss:
            return 0.0
        size = abs(self.float32_loss)
        return abs(self.loss - self.float32_loss) / size if size else math.inf


def compare(
    fun: Callable[..., jax.Array],
    reference_fun: Callable[..., jax.Array],
    args: Sequence[PyTree],
    policy: Policy,
    scale: float,
) -> Comparison:
    """Compares `fun`, scaled and under a policy, with a function in float32."""
    loss, scaled = _loss_and_grads(fun, args, policy, scale)
    float32 = Policy.from_name("float32")
    exact_loss, exact = _loss_and_grads(reference_fun, args, float32, 1.0)
    paths = [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(args[0])]
    stacks = [_stack(x, y, scale) for x, y in zip(scaled, exact, strict=True)]
    parameters = [_gradient(*x) for x in zip(paths, stacks, strict=True)]
    parameters.sort(key=lambda x: (not math.isnan(x.cosine), x.cosine))
    total = _gradient("", np.concatenate(stacks, axis=1))
    return Comparison(scale, loss, exact_loss, total, tuple(parameters))


def cast(args: Sequence[PyTree], policy: Policy) -> tuple[PyTree, ...]:
    """The arguments that a policy gives to a function, parameters first."""
    return (policy.cast_to_compute(args[0]), *map(policy.cast_inputs, args[1:]))


def _loss_and_grads(
    fun: Callable[..., jax.Array], args: Sequence[PyTree], policy: Policy, scale: float
) -> tuple[float, list[np.ndarray]]:
    """The loss, and the scaled gradient of each parameter: (n,)."""
    fun = policy.in_product_precision(fun)
    loss_fn = scaled(lambda *args: (fun(*args), None), scale)
    value_and_grads = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    (_, (_, loss, _)), grads = value_and_grads(*cast(args, policy))
    return float(loss), [np.ravel(x) for x in jax.tree.leaves(grads)]


def _stack(scaled: np.ndarray, exact: np.ndarray, scale: float) -> np.ndarray:
    """Float32 rows: both gradients; the exact one rounded; whether it is subnormal."""
    with np.errstate(all="ignore"):
        sizes = np.abs(exact) * np.float32(scale)
        rounded = sizes.astype(scaled.dtype).astype(np.float32)
        grad = scaled.astype(np.float32) / np.float32(scale)
    smallest = float(jnp.finfo(scaled.dtype).smallest_normal)
    return np.stack([grad, exact, rounded, (rounded != 0) & (rounded < smallest)])


def _gradient(path: str, stack: np.ndarray) -> GradientComparison:
    grad, exact, rounded, is_subnormal = stack
    with np.errstate(all="ignore"):
        # Inner products in float64, without copies of the arrays.
        square, product, exact_square = (
            np.einsum("i,i->", a, b, dtype=np.float64)
            for a, b in ((grad, grad), (grad, exact), (exact, exact))
        )
        ratio = np.sqrt(square) / np.sqrt(exact_square)
        cosine = product / (np.sqrt(square) * np.sqrt(exact_square))
    if square == exact_square == 0:
        ratio = cosine = 1.0
    elif square == 0 or exact_square == 0:
        cosine = 0.0
    is_used = exact != 0
    is_changed = is_used & (rounded == 0), is_subnormal, ~np.isfinite(rounded)
    num_used = max(1, np.count_nonzero(is_used))
    shares = (np.count_nonzero(x) / num_used for x in is_changed)
    not_finite = np.count_nonzero(~np.isfinite(grad)) / max(1, grad.size)
    return GradientComparison(
        path, grad.size, float(cosine), float(ratio), not_finite, *shares
    )
