"""Whether a policy is safe for a private run: its error beside the noise of the run.

Per-example gradients are clipped and added up as in training, under the policy and in
float32, and the two sums are compared: at the given parameters, and at those that
private training in float32 makes of them. There, entries have grown, and a gradient
that was exact at zero may round.
"""

import contextlib
import dataclasses
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

from dpmp import _plain_text, _validate
from dpmp._arrays import as_device_dtypes
from dpmp._typing import PyTree
from dpmp.engines import check_num_args
from dpmp.loss_scaling import ScaledLoss
from dpmp.mechanism import DPSGD
from dpmp.numerics import is_grid, to_float
from dpmp.precision import Policy, is_autocast
from dpmp.tools.precision_report._comparison import cast, path_of

# A policy is safe if all its errors together stay below this share of all noise.
_SHARE_OF_NOISE = 0.3
# Or if steps go as far down the slope of the loss as in float32, up to this share, and
# no further to the side than this share of the longest of them. To the side, the loss
# changes by the square of it.
_ALONG, _ASIDE = 0.05, 0.3

# The numbers of parameters that are tried in float32, out of so many candidates.
_TRIED = 1, 3, 10
_NUM_CANDIDATES = 32

_NUM_STEPS = 100  # of the training in float32, at most

_SLOW = 1.2  # one measurement tells no smaller difference

_Leaves = list[np.ndarray]  # of a sum of clipped gradients, in float64
_FLOAT32 = Policy.from_name("float32")
_PRESETS = "tf32", "mixed_bfloat16", "mixed_float16", "float8"


@dataclass(frozen=True)
class Verdict:
    """Whether a policy is safe for a private run. None of these numbers has noise.

    Attributes:
      policy: the name of the policy, or its compute dtype.
      is_safe: whether the private run should reach the same loss as in float32.
      float32_paths: the parameters that must stay in float32 for that.
      kept: how far steps go in the direction of the float32 gradient, over how far they
        should go: 1.0 if nothing is lost.
      aside: the length of the rest of the step, over that of the longest in float32.
      error: the errors of all steps, as if all had one direction, over the norm of the
        noise of all steps.
      steps: the number of private steps in float32 after which the policy was compared
        once more. All numbers are those of the worse comparison.
      time_ratio: the time of a sum of clipped gradients on this device, over float32.
    """

    policy: str
    is_safe: bool
    float32_paths: tuple[str, ...]
    kept: float
    aside: float
    error: float
    steps: int
    time_ratio: float

    def __str__(self) -> str:
        answer = "no"
        if self.is_safe:
            paths = f"float32_paths={self.float32_paths!r}"
            answer = f"only with {paths}" if self.float32_paths else "yes"
            is_hidden = self.error <= _SHARE_OF_NOISE
            answer += ", because "
            answer += "noise hides the errors" if is_hidden else "steps hardly differ"
        text = (
            f"Is {self.policy} safe for this private run? {answer}. Steps go "
            f"{self.kept:.1%} as far in the direction of the float32 gradient, and "
            f"{self.aside:.1%} aside. The errors of all steps are at most "
            f"{self.error:.2g} times their noise. That is the worse of two answers: at "
            f"the given parameters, and after {self.steps} private steps in float32."
        )
        if not self.is_safe:
            text += (
                " Inputs are rounded too: scale or centre them first. Or use "
                'policy="float32" with dpmp.autocast(loss). dpmp.precision_report '
                "names lines where 16 bits are too few."
            )
        if self.time_ratio > _SLOW:
            text += (
                f" On this device, it takes {self.time_ratio:.1f} times as long as "
                "float32."
            )
        return _plain_text.paragraph(text)


def compare_policies(
    fun: Callable[..., Any],
    *args: Any,
    mechanism: DPSGD,
    optimizer: optax.GradientTransformation,
    policies: Sequence[str | Policy] = _PRESETS,
    loss_scale: float = 1.0,
    reference: Callable[..., Any] | None = None,
) -> list[Verdict]:
    """Says which policies are safe for a private run, and which parameters need more.

    Rounding errors that are much smaller than the noise of the run do no harm. Sums of
    clipped gradients are compared with those in float32 twice: at the given parameters,
    and after up to 100 private steps in float32 on the given batch. If a policy is not
    safe, it is tried again with a few parameters in float32: those whose
    rounding alone moves the gradient most.

    The numbers have no noise: use public or synthetic data only.

    >>> mechanism = DPSGD(
    ...     num_examples=1000, expected_batch_size=100, iterations=50, l2_clip_norm=1.0
    ... ).calibrate(epsilon=8.0, delta=1e-5)
    >>> (verdict,) = compare_policies(
    ...     lambda w, x: jnp.mean((x @ w) ** 2),
    ...     jnp.ones(3),
    ...     np.ones((8, 3), np.float32),
    ...     mechanism=mechanism,
    ...     optimizer=optax.sgd(0.1),
    ...     policies=["mixed_bfloat16"],
    ... )
    >>> verdict.is_safe
    True

    Args:
      fun: the loss of one example, which gets it as a batch of one, as for `DPTrainer`
        without a key.
      *args: the first parameters, and a batch: arrays with an axis of examples. 32 of
        them or more tell enough.
      mechanism: a calibrated run, with its clip norm, noise and number of steps.
      optimizer: the optimizer of the run, which decides how far parameters move.
      policies: a list of policies or names of presets. Of a policy with a
        `rounded_share`, all products are rounded.
      loss_scale: the factor of the loss, a power of two, where a policy computes in
        float16.
      reference: the loss in float32 to compare with; `fun` by default. To ask about
        `autocast(loss)`, pass it as `fun`, with `policies=["float32"]` and
        `reference=loss`.

    Returns:
      A verdict for each policy.

    Raises:
      ValueError: if the mechanism is not private, if `policies` is a single name, or as
        by `clipped_grad` and `Policy.from_name`.
    """
    _validate.function(fun=fun)
    check_num_args(args, (0, 1))
    fix = "Use dpmp.DPSGD(...).calibrate(...)."
    _validate.instance(DPSGD, fix, mechanism=mechanism)
    _validate.require(
        mechanism.is_private,
        "the mechanism must be private. Use mechanism.calibrate(epsilon=, delta=).",
        noise_multiplier=mechanism.noise_multiplier,
    )
    fix = 'Use ["mixed_bfloat16"], for example.'
    policies = _validate.instance((list, tuple), fix, policies=policies)
    fix = "Use optax.adam(1e-3), for example."
    _validate.instance(optax.GradientTransformation, fix, optimizer=optimizer)
    args = as_device_dtypes(args)
    _validate.require(
        not any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(args)),
        "parameters and batch must be arrays, because the answer depends on their "
        "values. Pass public or synthetic examples, or use dpmp.precision_report.",
        given="ShapeDtypeStruct",
    )
    first = mechanism.initial_clip_norm
    mechanism = dataclasses.replace(
        mechanism,
        l2_clip_norm=mechanism.l2_clip_norm if first is None else float(first),
        released_metrics=None,
        microbatch_size=None,
    )
    _validate.optional(_validate.function)(reference=reference)
    trials = _Trials(fun, args, mechanism, optimizer, loss_scale, reference or fun)
    return [_verdict(trials, x) for x in policies]


def _verdict(trials: "_Trials", given: str | Policy) -> Verdict:
    policy = Policy.parse(given)
    name = given if isinstance(given, str) else _name_of(policy)
    name += " with autocast" if trials.is_autocast else ""
    first = verdict = trials.of(policy, name)
    if verdict.is_safe:
        return verdict
    paths = trials.furthest(policy)
    for number in _TRIED:
        tried = *policy.float32_paths, *paths[:number]
        # Some losses do not run on parameters of several dtypes.
        with contextlib.suppress(TypeError, ValueError):
            verdict = trials.of(dataclasses.replace(policy, float32_paths=tried), name)
        if verdict.is_safe:
            return verdict
    return first


def _name_of(policy: Policy) -> str:
    formats = dict.fromkeys(form for _, form in policy.products)
    with_products = f" with products in {', '.join(formats)}" if formats else ""
    return policy.compute_dtype.name + with_products


class _Trials:
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
        self._steps = min(mechanism.iterations, _NUM_STEPS)
        self._run = functools.cache(self._compiled)
        self._sum = functools.cache(self._clipped_sum)
        self._seconds = functools.cache(self._measured)
        self._params = args[0], self._trained(args[0], optimizer)

    def _trained(self, params: PyTree, optimizer: optax.GradientTransformation) -> Any:
        """The parameters after private steps in float32."""
        stddev = self._mechanism.stddev

        @jax.jit
        def update(params, opt_state, total, key):
            leaves, treedef = jax.tree.flatten(params)
            keys = jax.random.split(key, len(leaves))
            grads = [
                x / self._share() + stddev * jax.random.normal(k, x.shape, x.dtype)
                for x, k in zip(total, keys, strict=True)
            ]
            updates, opt_state = optimizer.update(
                jax.tree.unflatten(treedef, grads), opt_state, params
            )
            return optax.apply_updates(params, updates), opt_state

        run = self._run(self._reference, _FLOAT32)
        params = _FLOAT32.cast_to_param(params)
        opt_state = optimizer.init(params)
        # The data are public, and so may the noise be.
        for key in jax.random.split(jax.random.key(0), self._steps):
            total = run(params, *self._batch)
            params, opt_state = update(params, opt_state, total, key)
        return params

    def of(self, policy: Policy, name: str) -> Verdict:
        """Compares a policy with float32, where that is worse for it."""
        found = [self._at(place, policy, name) for place in (0, 1)]
        return max(found, key=lambda verdict: (not verdict.is_safe, verdict.error))

    def _at(self, place: int, policy: Policy, name: str) -> Verdict:
        """Compares a policy with float32 at one of the sets of parameters."""
        found = self._sum(self._fun, policy, place)
        exact = self._sum(self._reference, _FLOAT32, place)
        grad, reference = _flat(found), _flat(exact)
        length = float(np.linalg.norm(reference))
        _validate.require(
            0 < length < math.inf,
            "the clipped gradients in float32 must have a sum that is finite and not "
            "zero. Look for NaN in the batch and the parameters, and try a lower "
            "learning rate.",
            norm=length,
            steps=self._steps * place,
        )
        kept = float(grad @ reference) / length**2
        aside = float(np.linalg.norm(grad - kept * reference)) / self._longest_step()
        noise = self._mechanism.stddev * self._share()
        noise *= math.sqrt(grad.size / self._mechanism.iterations)
        error = float(np.linalg.norm(grad - reference)) / noise
        is_close = abs(kept - 1) <= _ALONG and aside <= _ASIDE
        return Verdict(
            policy=name,
            is_safe=is_close or error <= _SHARE_OF_NOISE,
            float32_paths=policy.float32_paths,
            kept=kept,
            aside=aside,
            error=error,
            steps=self._steps,
            time_ratio=self._seconds(self._fun, policy)
            / self._seconds(self._reference, _FLOAT32),
        )

    def _share(self) -> float:
        """The size of the batch over the expected one, for which `stddev` is."""
        number = len(jax.tree.leaves(self._batch)[0])
        return number / self._mechanism.expected_batch_size

    def _longest_step(self) -> float:
        """The norm of the longest sum in float32: training ends with short ones."""
        totals = (self._sum(self._reference, _FLOAT32, place) for place in (0, 1))
        return max(float(np.linalg.norm(_flat(total))) for total in totals)

    def furthest(self, policy: Policy) -> list[str]:
        """Expressions for the paths of parameters, those that matter most first.

        A parameter matters if rounding it alone moves the last sum in float32.
        """
        params = self._params[1]
        exact = self._sum(self._reference, _FLOAT32, 1)
        errors = map(_distance, self._sum(self._fun, policy, 1), exact)
        candidates = np.argsort(list(errors))[::-1][:_NUM_CANDIDATES]
        leaves, treedef = jax.tree.flatten(params)
        rounded = jax.tree.leaves(jax.jit(policy.cast_to_compute)(params))

        def effect(i: int) -> float:
            changed = [
                *leaves[:i],
                rounded[i].astype(leaves[i].dtype),
                *leaves[i + 1 :],
            ]
            params = jax.tree.unflatten(treedef, changed)
            moved = self._run(self._reference, _FLOAT32)(params, *self._batch)
            return math.hypot(*map(_distance, moved, exact))

        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        order = sorted(candidates, key=effect, reverse=True)
        return [f"^{re.escape(path_of(paths[i]))}$" for i in order]

    def _clipped_sum(
        self, fun: Callable[..., Any], policy: Policy, place: int
    ) -> _Leaves:
        """A sum of clipped gradients, by leaf in float64."""
        total = self._run(fun, policy)(self._params[place], *self._batch)
        return [np.asarray(x, np.float64) for x in total]

    def _measured(self, fun: Callable[..., Any], policy: Policy) -> float:
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
            total = grad_fn(*cast(args, policy))
            return list(map(to_float, jax.tree.leaves(total, is_leaf=is_grid)))

        return run


def _flat(leaves: _Leaves) -> np.ndarray:
    return np.concatenate([np.ravel(x) for x in leaves])


def _distance(a: Any, b: Any) -> float:
    return float(np.linalg.norm(np.ravel(np.asarray(a, np.float64) - b)))
