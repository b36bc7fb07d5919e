"""Compares a loss and its gradients under policies with those in float32, on data."""

import functools
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.engines import scaled
from dpmp.loss_scaling import ScaledLoss
from dpmp.mechanism import DPSGD
from dpmp.numerics import is_grid, to_float
from dpmp.precision import Policy, is_autocast, name_of
from dpmp.programs import interpreter, losses
from dpmp.programs.analysis import equations

# A policy is safe if all its errors together stay below this share of all noise.
SHARE_OF_NOISE = 0.3
# Or if steps go as far down the slope of the loss as in float32, up to this share, and
# no further to the side than this share of the longest of them. To the side, the loss
# changes by the square of it.
_ALONG, _ASIDE = 0.05, 0.3

_NUM_CANDIDATES = 32  # parameters whose rounding is tried alone
_NUM_STEPS = 100  # of the training in float32, at most

_Leaves = list[np.ndarray]  # of a sum of clipped gradients, in float64
_FLOAT32 = Policy.from_name("float32")


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
    exact_loss, exact = _loss_and_grads(reference_fun, args, _FLOAT32, 1.0)
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


class Trials:
    """Sums of clipped gradients of one loss under several policies."""

    def __init__(
        self,
        fun: Callable[..., Any],
        args: Sequence[PyTree],
        mechanism: DPSGD,
        optimizer: optax.GradientTransformation,
        loss_scale: float,
        reference: Callable[..., Any],
    ):
        self._fun, self._batch, self._loss_scale = fun, args[1:], loss_scale
        self._mechanism, self._reference = mechanism, reference
        self.is_autocast = is_autocast(fun)
        self.steps = min(mechanism.iterations, _NUM_STEPS)
        self._run = functools.cache(self._compiled)
        self._params = args[0], self._trained(args[0], optimizer)
        self._exact = [self._sum(reference, _FLOAT32, x) for x in self._params]
        self._lengths = [float(np.linalg.norm(_flat(x))) for x in self._exact]
        for place, length in enumerate(self._lengths):
            if not 0 < length < math.inf:
                _validate.fail(
                    "the clipped gradients in float32 must have a sum that is finite "
                    "and not zero. Look for NaN in the batch and the parameters, and "
                    "try a lower learning rate.",
                    norm=length,
                    steps=self.steps * place,
                )
        self._exact_seconds = self._seconds(reference, _FLOAT32)

    def _trained(self, params: PyTree, optimizer: optax.GradientTransformation) -> Any:
        """The parameters after private steps in float32."""
        stddev = self._mechanism.stddev

        @jax.jit
        def update(params, opt_state, total, key):
            noise = optax.tree_utils.tree_random_like(key, total)
            grads = jax.tree.map(
                lambda x, z: x / self._share() + stddev * z, total, noise
            )
            grads = jax.tree.unflatten(jax.tree.structure(params), grads)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        run = self._run(self._reference, _FLOAT32)
        params = _FLOAT32.cast_to_param(params)
        opt_state = optimizer.init(params)
        # The data are public, and so may the noise be.
        for key in jax.random.split(jax.random.key(0), self.steps):
            total = run(params, *self._batch)
            params, opt_state = update(params, opt_state, total, key)
        return params

    def of(self, policy: Policy) -> dict[str, Any]:
        """Fields of a `Verdict`, from the worse of two comparisons with float32."""
        found = [self._at(place, policy) for place in (0, 1)]
        return max(found, key=lambda x: (not x["is_safe"], x["error"]))

    def has_effect(self, policy: Policy) -> bool:
        """Whether a policy of 16 bits lets the loss multiply in them."""
        one = jax.tree.map(lambda x: x[:1], self._batch)
        args = jax.eval_shape(lambda: cast((self._params[0], *one), policy))
        jaxpr, _ = interpreter.trace(self._fun, *args)
        narrow = losses.are_narrow(equations(jaxpr.jaxpr))
        return policy.compute_dtype.itemsize > 2 or not narrow or any(narrow)

    def time_ratio(self, policy: Policy) -> float:
        """The time of a sum under a policy over that in float32."""
        return self._seconds(self._fun, policy) / self._exact_seconds

    def _at(self, place: int, policy: Policy) -> dict[str, Any]:
        """Compares a policy with float32 at one of the sets of parameters."""
        grad = _flat(self._sum(self._fun, policy, self._params[place]))
        reference = _flat(self._exact[place])
        kept = float(grad @ reference) / self._lengths[place] ** 2
        # Over the longest sum in float32, because training ends with short ones.
        longest = max(self._lengths)
        aside = float(np.linalg.norm(grad - kept * reference)) / longest
        noise = self._mechanism.stddev * self._share()
        noise *= math.sqrt(grad.size / self._mechanism.iterations)
        error = float(np.linalg.norm(grad - reference)) / noise
        is_close = abs(kept - 1) <= _ALONG and aside <= _ASIDE
        is_safe = is_close or error <= SHARE_OF_NOISE
        return {"is_safe": is_safe, "kept": kept, "aside": aside, "error": error}

    def _share(self) -> float:
        """The size of the batch over the expected one, for which `stddev` is."""
        number = len(jax.tree.leaves(self._batch)[0])
        return number / self._mechanism.expected_batch_size

    def furthest(self, policy: Policy) -> list[str]:
        """Paths of the parameters whose rounding alone moves a float32 sum the most."""
        params, exact = self._params[1], self._exact[1]
        pairs = zip(self._sum(self._fun, policy, params), exact, strict=True)
        errors = [float(np.linalg.norm(np.ravel(a - b))) for a, b in pairs]
        candidates = np.argsort(errors)[::-1][:_NUM_CANDIDATES]
        leaves, treedef = jax.tree.flatten(params)
        rounded = jax.tree.leaves(jax.jit(policy.cast_to_compute)(params))

        def effect(i: int) -> float:
            changed = list(leaves)
            changed[i] = rounded[i].astype(leaves[i].dtype)
            params = jax.tree.unflatten(treedef, changed)
            moved = self._sum(self._reference, _FLOAT32, params)
            return float(np.linalg.norm(_flat(moved) - _flat(exact)))

        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        order = sorted(candidates, key=effect, reverse=True)
        return [f"^{re.escape(name_of(paths[i]))}$" for i in order]

    def _sum(self, fun: Callable[..., Any], policy: Policy, params: PyTree) -> _Leaves:
        """A sum of clipped gradients, by leaf in float64."""
        total = self._run(fun, policy)(params, *self._batch)
        return [np.asarray(x, np.float64) for x in total]

    def _seconds(self, fun: Callable[..., Any], policy: Policy) -> float:
        """The seconds that a sum takes once it is compiled."""
        run = self._run(fun, policy)
        start = time.perf_counter()
        jax.block_until_ready(run(self._params[0], *self._batch))
        return time.perf_counter() - start

    def _compiled(
        self, fun: Callable[..., Any], policy: Policy
    ) -> Callable[..., list[jax.Array]]:
        scale = self._loss_scale if policy.compute_dtype == jnp.float16 else 1.0
        loss = ScaledLoss(policy.in_product_precision(fun), scale)
        grad_fn = self._mechanism.clipped_grad(loss)

        @jax.jit
        def run(*args: PyTree) -> list[jax.Array]:
            # NumPy would warn of values out of range, which are sensitive.
            mask = np.zeros(len(jax.tree.leaves(args[1])[0]), bool)
            total = grad_fn(*cast(args, policy), is_padding_example=mask)
            return list(map(to_float, jax.tree.leaves(total, is_leaf=is_grid)))

        return run


def _flat(leaves: _Leaves) -> np.ndarray:
    return np.concatenate([np.ravel(x) for x in leaves])
