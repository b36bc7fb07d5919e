"""Whether a policy is safe for a private run: its error beside the noise of the run.

Sums are compared after private steps in float32, too: there, entries have grown, and a
gradient that was exact at zero may round.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax

from dpmp import _plain_text, _validate
from dpmp._arrays import as_device_dtypes
from dpmp.engines import Signature, check_num_args
from dpmp.mechanism import DPSGD
from dpmp.precision import Policy, reference_of
from dpmp.tools.precision_report._comparison import SHARE_OF_NOISE, Trials

# The numbers of parameters that are tried in float32.
_TRIED = 1, 3, 10

_WITH_AUTOCAST, _WITH_PRODUCTS = " with autocast", " with products"
_FARTHEST = 10.0  # percentages beyond say nothing
_SLOW = 1.2  # one measurement tells no smaller difference

_PRESETS = "tf32", "mixed_bfloat16", "mixed_float16", "float8"


@dataclass(frozen=True)
class Verdict:
    """Whether a policy is safe for a private run. None of these numbers has noise.

    Attributes:
      policy: the name of the policy; see `Policy.name`.
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
      has_effect: whether products are in the policy's 16 bits. If not, the loss or a
        layer widens what it is given, and the policy saves nothing.
    """

    policy: str
    is_safe: bool
    float32_paths: tuple[str, ...]
    kept: float
    aside: float
    error: float
    steps: int
    time_ratio: float
    has_effect: bool

    def __str__(self) -> str:
        answer = "no"
        if self.is_safe:
            paths = f"float32_paths={self.float32_paths!r}"
            answer = f"only with {paths}" if self.float32_paths else "yes"
            is_hidden = self.error <= SHARE_OF_NOISE
            answer += ", because "
            answer += "noise hides the errors" if is_hidden else "steps hardly differ"
        text = f"Is {self.policy} safe for this private run? {answer}. "
        if not self.has_effect:
            text = (
                f"No effect: no product is in {self.policy}. The loss, or a layer with "
                "a dtype of its own such as nnx.Embed, widens its operands, and the "
                f"policy saves nothing. {text}"
            )
        steps = "The float32 gradient is so much smaller that only rounding is left."
        if abs(self.kept) <= _FARTHEST:
            steps = (
                f"Steps go {self.kept:.1%} as far in the direction of the float32 "
                f"gradient, and {self.aside:.1%} aside."
            )
        text += (
            f"{steps} The errors of all steps are at most {self.error:.2g} times their "
            "noise. That is the worse of two answers: at the given parameters, and "
            f"after {self.steps} private steps in float32."
        )
        if not self.is_safe and self.policy.endswith(_WITH_AUTOCAST):
            text += (
                " Products are too narrow here: compute those whose results are "
                "subtracted or scaled up without autocast, or all of them."
            )
        elif not self.is_safe and _WITH_PRODUCTS in self.policy:
            text += (
                " All products were rounded: exempt some layers by products={...}, or "
                "round half of them in a step by rounded_share=0.5, which loses less."
            )
        elif not self.is_safe:
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
      reference: the loss in float32 to compare with; `fun` by default, and `loss` for
        `fun=autocast(loss)`, about which `policies=["float32"]` asks.

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
    if not mechanism.is_private:
        _validate.fail(
            "the mechanism must be private. Use mechanism.calibrate(epsilon=, delta=).",
            noise_multiplier=mechanism.noise_multiplier,
        )
    fix = 'Use ["mixed_bfloat16"], for example.'
    policies = _validate.instance((list, tuple), fix, policies=policies)
    fix = "Use optax.adam(1e-3), for example."
    _validate.instance(optax.GradientTransformation, fix, optimizer=optimizer)
    args = as_device_dtypes(args)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(args)):
        _validate.fail(
            "parameters and batch must be arrays, because the answer depends on their "
            "values. Pass public or synthetic examples, or use dpmp.precision_report.",
            given="ShapeDtypeStruct",
        )
    batched = Signature.parse(batch_argnums=[*range(1, len(args))])
    first, rows = mechanism.initial_clip_norm, batched.batch_size(args)
    mechanism = dataclasses.replace(
        mechanism,
        l2_clip_norm=mechanism.l2_clip_norm if first is None else float(first),
        released_metrics=None,
        microbatch_size=None,
        # Sums of all rows, which are no drawn batch.
        num_examples=max(rows, mechanism.num_examples),
        truncated_batch_size=rows,
        sampling_prob=None,
        sampling="poisson",
        strategy=None,
    )
    _validate.optional(_validate.function)(reference=reference)
    reference = reference_of(fun) if reference is None else reference
    trials = Trials(fun, args, mechanism, optimizer, loss_scale, reference)
    return [_verdict(trials, x) for x in policies]


def _verdict(trials: Trials, given: str | Policy) -> Verdict:
    policy = dataclasses.replace(Policy.parse(given), rounded_share=1.0)
    name = given if isinstance(given, str) else policy.name
    name += _WITH_AUTOCAST if trials.is_autocast else ""

    def of(policy: Policy) -> Verdict:
        return Verdict(
            policy=name,
            float32_paths=policy.float32_paths,
            **trials.of(policy),
            steps=trials.steps,
            time_ratio=trials.time_ratio(policy),
            has_effect=trials.has_effect(policy),
        )

    first = verdict = of(policy)
    if verdict.is_safe:
        return verdict
    paths = trials.furthest(policy)
    for number in _TRIED:
        tried = *policy.float32_paths, *paths[:number]
        wider = dataclasses.replace(policy, float32_paths=tried)
        # Some losses do not run on parameters of several dtypes. In others, one
        # parameter in float32 makes all products behind it wider.
        with contextlib.suppress(TypeError, ValueError):
            verdict = of(wider) if trials.has_effect(wider) else first
        if verdict.is_safe:
            return verdict
    return first
