"""States the privacy claim of a mechanism in plain words, with its assumptions."""

import math
import textwrap

import dp_accounting
import jax

from dpmp import accounting, batch_selection
from dpmp._typing import PyTree
from dpmp.accounting._rounding import digits_above, digits_below, round_up
from dpmp.clipping._joint_sums import ReleasedMetrics
from dpmp.numerics._arithmetic import Arithmetic

_Relation = dp_accounting.NeighboringRelation

_NEIGHBOURS = {
    _Relation.ADD_OR_REMOVE_ONE: "one has one example more than the other",
    _Relation.REPLACE_ONE: "they differ in the content of one example",
    _Relation.REPLACE_SPECIAL: "one example of the first is blanked out in the second",
}

# Under ADD_OR_REMOVE_ONE this replaces the number of examples, which is protected.
_NUMBER_IS_PROTECTED = (
    "The number of examples is protected with them. The settings of the run (sampling "
    "probability, batch sizes, steps) are public, and it is assumed that they were "
    "chosen without that number, which they would give away. (A sampling probability "
    "that was computed as the expected batch size over that number gives it away to "
    "those who know both.)"
)


def no_claim() -> str:
    """The statement of a mechanism that is not private."""
    return _wrap(
        "No privacy: gradients are not clipped or no noise is added, and anything "
        "computed from them may reveal the training data."
    )


def no_epsilon(delta: float) -> str:
    """The statement of a mechanism with clipping, noise and an infinite epsilon."""
    return _wrap(
        f"No epsilon is claimed at delta {digits_above(delta, 3)}. "
        f"Gradients are clipped and noise is added, but so little that its distance "
        f"from ideal Gaussian noise counts: "
        f"added up over all steps and parameters, and multiplied by exp(epsilon), that "
        f"is more than the share of delta that is left for it. Use more noise, a "
        f"larger delta, or a num_parameters closer to what is trained."
    )


def claim(
    guarantee: accounting.PrivacyGuarantee,
    sampling: batch_selection.PoissonSampling,
    *,
    num_examples: int,
    expected_batch_size: float,
    l2_clip_norm: PyTree,
    noise_multiplier: float,
    arithmetic: Arithmetic,
    microbatch_size: int | None,
    resolution: int | None,
    released_metrics: ReleasedMetrics | None,
) -> str:
    """The statement of a mechanism with a finite epsilon; `DPSGD` has the arguments."""
    relation = _Relation[guarantee.neighboring_relation]
    number = f"The number of examples, {num_examples}, is public."
    if relation is _Relation.ADD_OR_REMOVE_ONE:
        number = _NUMBER_IS_PROTECTED
    return _wrap(
        f"The trained parameters, and all that comes of the noisy gradients, are "
        f"({round_up(guarantee.epsilon)}, {digits_above(guarantee.delta, 3)})-"
        f"differentially private.",
        f"- Protected unit: one example. Two datasets are neighbours if "
        f"{_NEIGHBOURS[relation]}. {number}",
        f"- Sampling: each example is in each batch independently with probability "
        f"{digits_above(sampling.sampling_prob, 4)} "
        f"(expected batch size {expected_batch_size:g}); "
        f"batches above {sampling.truncated_batch_size} are truncated at random, and "
        f"that is accounted for. Batches taken in any other way void the claim.",
        f"- Steps: {sampling.iterations}.",
        f"- Clipping: L2 norm of {_describe_clip_norm(l2_clip_norm)} per example.",
        f"- Noise: Gaussian, noise multiplier {digits_below(noise_multiplier, 5)} "
        f"(standard deviation over the largest contribution of one example).",
        *_describe_metrics(released_metrics, noise_multiplier, expected_batch_size),
        f"- Accountant: {guarantee.accountant}.",
        "- Arithmetic: "
        + _describe_arithmetic(
            arithmetic, microbatch_size, resolution, noise_multiplier
        ),
        "- Not covered: the random bits are assumed ideal and their keys secret; "
        "running time, which depends on the batch size; losses, norms and "
        "other per-example values, and choices made by looking at them (such as "
        "hyper-parameters tuned on this data); anything else released about the data.",
    )


def _describe_metrics(
    metrics: ReleasedMetrics | None, noise_multiplier: float, batch_size: float
) -> list[str]:
    if metrics is None:
        return []
    means = ", ".join(
        f"{name} (standard deviation "
        f"{metrics.stddev(name, noise_multiplier, batch_size):.2g})"
        for name in metrics.names
    )
    return [
        f"- Released at every step, besides the gradient and covered with it: the mean "
        f"of {means}. That makes the noise on the gradient {metrics.widening:.2%} "
        f"wider than it would be."
    ]


def _describe_arithmetic(
    arithmetic: Arithmetic,
    microbatch_size: int | None,
    resolution: int | None,
    noise_multiplier: float,
) -> str:
    sentences = [
        arithmetic.describe(resolution, microbatch_size),
        "Discrete Gaussian noise, in integers, is added before anything is rounded to "
        "float32.",
    ]
    if resolution is not None:
        units = f"{resolution * noise_multiplier:.0f}"
        sentences.append(f"Its standard deviation has {units} units of the grid.")
    if arithmetic.is_proved:
        sentences.append("The claim holds for the bits that are released.")
    return " ".join([*sentences, arithmetic.assumption]).strip()


def _describe_clip_norm(l2_clip_norm: PyTree) -> str:
    norms = jax.tree.leaves(l2_clip_norm)
    if len(norms) == 1:
        return f"{norms[0]:g}"
    return f"{math.hypot(*norms):g} in {len(norms)} groups"


def _wrap(*lines: str) -> str:
    return "\n".join(textwrap.fill(x, 88, subsequent_indent="  ") for x in lines)
