"""States the privacy claim of a mechanism in plain words, with its assumptions."""

import dataclasses
import math
import textwrap
from typing import Any

import dp_accounting
import jax

from dpmp import accounting
from dpmp._typing import PyTree
from dpmp.accounting import digits_above, digits_below, round_up
from dpmp.clipping import AdaptiveClipNorm, AutomaticClipping, ReleasedMetrics
from dpmp.mechanism._fields import ComputedProbability
from dpmp.numerics import Arithmetic
from dpmp.strategies import BandedInverse

_Relation = dp_accounting.NeighboringRelation

_NEIGHBOURS = {
    _Relation.ADD_OR_REMOVE_ONE: "one has one example more than the other",
    _Relation.REPLACE_ONE: "they differ in the content of one example",
    _Relation.REPLACE_SPECIAL: (
        "one example of the first is replaced by padding in the second"
    ),
}


def no_claim() -> str:
    """The statement of a mechanism that is not private."""
    return _wrap(
        "No privacy: gradients are not clipped or no noise is added. Everything that "
        "is computed from them may reveal the training data."
    )


def no_epsilon(delta: float) -> str:
    """The statement of a mechanism with clipping, noise and an infinite epsilon."""
    return _wrap(
        f"No epsilon is claimed at delta {digits_above(delta, 3)}. Gradients are "
        f"clipped and noise is added, but so little noise that epsilon would be large. "
        f"The computed noise differs slightly from ideal Gaussian noise. Added up over "
        f"all steps and parameters, and multiplied by exp(epsilon), these differences "
        f"exceed the share of delta that is reserved for them. Use more noise, a "
        f"larger delta, or a num_parameters closer to the number of trained parameters."
    )


def claim(
    guarantee: accounting.PrivacyGuarantee,
    mechanism: Any,
    arithmetic: Arithmetic,
) -> str:
    """The statement of a `DPSGD` with a finite epsilon."""
    noise_multiplier = mechanism.noise_multiplier
    batch_size = mechanism.expected_batch_size
    epsilon, delta = round_up(guarantee.epsilon), digits_above(guarantee.delta, 3)
    return _wrap(
        f"The trained parameters are ({epsilon}, {delta})-differentially private, and "
        f"so is everything else that is computed from the noisy gradients. This means: "
        f"for two neighbouring datasets, the probability of any outcome on one is at "
        f"most exp({epsilon}) times its probability on the other, plus {delta}.",
        f"- Protected unit: one example. Two datasets are neighbours if "
        f"{_NEIGHBOURS[mechanism.neighboring_relation]}. {_describe_number(mechanism)}",
        f"- Sampling: {_describe_sampling(mechanism)} The claim does not hold for "
        f"batches that are taken in any other way.",
        f"- Steps: {mechanism.iterations}. Steps that are made again after their "
        f"release, and other runs on the same data, cost more.",
        f"- Clipping: {_describe_clipping(mechanism._clip_norm_tree)} The sum of the "
        f"clipped gradients is divided by {batch_size:g}, the expected batch size.",
        f"- Noise: the noise is Gaussian, with a noise multiplier of "
        f"{digits_below(noise_multiplier, 5)}. This is its standard deviation, divided "
        f"by the largest norm that one example contributes."
        f"{_describe_strategy(mechanism)}",
        *_describe_released(mechanism),
        f"- Accountant: {guarantee.accountant}.",
        f"- Arithmetic: {_describe_arithmetic(mechanism, arithmetic)}",
        f"- Assumed: the random bits are ideal, and nobody knows their keys. The "
        f"gradient of an example depends on this example and the parameters alone, up "
        f"to its last bit: not on other examples of the batch, and not on its place in "
        f"the batch. {arithmetic.assumption}",
        "- Not covered: running time, which depends on the size of the batch; losses, "
        "norms and other values of single examples; choices that were made by looking "
        "at such values (for example, hyper-parameters tuned on this data); anything "
        "else that is released about the data.",
    )


def _describe_sampling(mechanism: Any) -> str:
    """Says in which steps an example takes part."""
    epoch, groups = mechanism.steps_per_epoch, mechanism.cycle_length
    turns = (
        f"the examples form {groups} groups, by their places in the dataset, which "
        f"take turns. "
    )
    if isinstance(mechanism.strategy, BandedInverse):
        return f"{turns}All examples of a group are in its batch."
    largest = mechanism.batch_selection_strategy.truncated_batch_size
    truncated = (
        f"A batch of more than {largest} examples is truncated to {largest} of them, "
        f"drawn at random, and epsilon accounts for that."
    )
    prob = digits_above(mechanism.sampling_prob, 4)
    if mechanism.has_correlated_noise:
        return (
            f"{turns}Each example of a group is in its batch with probability {prob}, "
            f"independently of all others. {truncated}"
        )
    if epoch is None:
        return (
            f"each example is in each batch with probability {prob}, independently of "
            f"all others. {truncated}"
        )
    return (
        f"in every epoch of {epoch} steps, each example is in one batch, drawn "
        f"uniformly and independently of all others (random allocation). A run that "
        f"goes on inside an epoch makes the rest of it with Poisson sampling, which "
        f"costs more than is claimed here. {truncated}"
    )


def _describe_strategy(mechanism: Any) -> str:
    """Says how the noise of steps is correlated."""
    strategy = mechanism.strategy
    if strategy is None or strategy.bands == 1:
        return ""
    is_inverse = isinstance(strategy, BandedInverse)
    factors = ", ".join(f"{abs(x):g}" for x in strategy.coefficients[1:])
    return (
        f" The noise of a step depends on that of up to {strategy.bands - 1} steps "
        f"before: it is wider by a factor of {strategy.sensitivity:.4g}, and earlier "
        f"{'independent ' if is_inverse else ''}noise is subtracted from it, times "
        f"{factors}. A run that goes on after an interruption begins with new noise, "
        f"which may cost more than is claimed here."
    )


def _describe_number(mechanism: Any) -> str:
    """Says who knows the number of examples."""
    if not mechanism.hides_size:
        text = f"The number of examples, {mechanism.num_examples}, is public."
        if mechanism.delta >= 1 / mechanism.num_examples:
            text += (
                " Delta is too large: publishing one random example would satisfy it. "
                "Use a tenth of 1 over that number, or less."
            )
        return text
    text = (
        "The number of examples is protected too. The sampling probability, the batch "
        "sizes, the steps and the noise are public, and the claim assumes that they "
        "were chosen without knowledge of that number."
    )
    if isinstance(mechanism.sampling_prob, ComputedProbability):
        text += (
            " But the sampling probability was computed as the expected batch size "
            "over that number, and gives it away. Pass sampling_prob to avoid this."
        )
    if mechanism.truncated_batch_size is None:
        text += (
            " The largest batch size was computed from that number, and says roughly "
            "how large it is. Pass truncated_batch_size to avoid this."
        )
    elif _cost_shows_number(mechanism):
        text += (
            " Batches are truncated so often that epsilon, and a noise multiplier that "
            "was calibrated, depend on that number. Pass a larger truncated_batch_size "
            "to avoid this."
        )
    return text


def _cost_shows_number(mechanism: Any) -> bool:
    """Whether epsilon is another one if the dataset has one example more."""
    more = dataclasses.replace(mechanism, num_examples=mechanism.num_examples + 1)
    return more.guarantee().epsilon != mechanism.guarantee().epsilon


def _describe_released(mechanism: Any) -> list[str]:
    """Describes everything that a step releases besides the gradient."""
    metrics, adaptive = mechanism.released_metrics, mechanism._clip_norm_tree
    batch_size, noise = mechanism.expected_batch_size, mechanism.noise_multiplier
    counting = ReleasedMetrics.with_overflows(metrics)
    lines = []
    if is_adaptive := isinstance(adaptive, AdaptiveClipNorm):
        # The release of the noisy fraction makes all noise wider.
        noise = mechanism.stddev * batch_size / (1 + counting.noise_increase)
    if mechanism.strategy is not None:
        noise *= mechanism.strategy.width_of_counts
    stddevs = {x: counting.stddev(x, noise, batch_size) for x in counting.names}
    if metrics is not None:
        means = ", ".join(
            f"{name} (standard deviation {stddevs[name]:.2g})" for name in metrics.names
        )
        lines.append(
            f"- Released at every step, with noise: the means of {means}. The claim "
            f"covers them. They make the noise on the gradient "
            f"{metrics.noise_increase:.2%} wider."
        )
    if metrics is None or not metrics.fraction_overflowed:
        lines.append(
            f"- DPTrainer also releases, at every step, the fraction of examples whose "
            f"gradient is not finite, with noise of standard deviation "
            f"{stddevs['overflowed']:.2g}. The claim covers it, and it costs nothing."
        )
    if is_adaptive:
        lines.append(
            f"- Released at every step, with noise: the fraction of examples whose "
            f"gradient norm is at most the clip norm (standard deviation "
            f"{adaptive.stddev(mechanism.stddev):.2g}), and the next clip norm, which "
            f"is computed from it. The claim covers both. They make the noise on the "
            f"gradient {adaptive.noise_increase:.2%} wider."
        )
    return lines


def _describe_arithmetic(mechanism: Any, arithmetic: Arithmetic) -> str:
    resolution = mechanism.resolution
    sentences = [
        arithmetic.describe(resolution, mechanism.microbatch_size),
        "The noise consists of integers (discrete Gaussian noise), which are added "
        "before the result is rounded to float32.",
    ]
    if resolution is not None:
        widened = mechanism.strategy.sensitivity if mechanism.strategy else 1.0
        units = f"{resolution * mechanism.noise_multiplier * widened:.0f}"
        sentences.append(f"Its standard deviation is {units} units of the grid.")
    if arithmetic.is_proved:
        sentences.append("The claim holds for the bits that are released.")
    return " ".join(sentences)


def _describe_clipping(l2_clip_norm: PyTree) -> str:
    if isinstance(l2_clip_norm, AutomaticClipping):
        return (
            f"the gradient of each example is divided by its L2 norm plus "
            f"{l2_clip_norm.stability:g} (automatic clipping), so that its norm is "
            f"below 1."
        )
    if isinstance(l2_clip_norm, AdaptiveClipNorm):
        return (
            f"the gradient of each example is clipped to an L2 norm that begins at "
            f"{l2_clip_norm.initial:g}, and then follows the {l2_clip_norm.quantile:g} "
            f"quantile of the norms."
        )
    norms = jax.tree.leaves(l2_clip_norm)
    groups = f" in {len(norms)} groups of parameters" if len(norms) > 1 else ""
    return (
        f"the gradient of each example is clipped to an L2 norm of "
        f"{math.hypot(*norms):g}{groups}."
    )


def _wrap(*lines: str) -> str:
    wrap = textwrap.TextWrapper(88, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(map(wrap.fill, lines))
