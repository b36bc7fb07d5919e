"""Checks the fields of `DPSGD`."""

from typing import Any

import jax

from dpmp import _validate, accounting
from dpmp._numbers import as_real
from dpmp._warnings import warn
from dpmp.mechanism._batches import ComputedProbability

# By field: its check, and what to do if it fails.
_CHECKS = {
    "num_examples": (_validate.positive_integer, "Count the examples to train on."),
    "expected_batch_size": (_validate.positive, "Use 256, for example."),
    "iterations": (_validate.positive_integer, "Or use DPSGD.from_epochs(epochs=3)."),
    "num_parameters": (_validate.positive_integer, "Count the parameters to train."),
    "rescale_to_unit_norm": (_validate.boolean, "Leave it out for False."),
}
_OPTIONAL_CHECKS = {
    "noise_multiplier": (_validate.nonnegative, "Leave it out and call calibrate."),
    "truncated_batch_size": (_validate.positive_integer, "Use 32, or None."),
    "microbatch_size": (_validate.positive_integer, "Use 32, or None."),
}


def checked_fields(mechanism: Any) -> dict[str, Any]:
    """Returns Python numbers and bools by name; ValueError for one out of range."""
    checked: dict[str, Any] = {
        name: check(**{name: getattr(mechanism, name)}, fix=fix)
        for name, (check, fix) in (_CHECKS | _OPTIONAL_CHECKS).items()
        if name in _CHECKS or getattr(mechanism, name) is not None
    }
    if mechanism.delta is not None:
        checked["delta"] = accounting.check_delta(mechanism.delta)
    # `ClipNorms` checks the values of the clip norms.
    checked["l2_clip_norm"] = jax.tree.map(as_real, mechanism.l2_clip_norm)
    sizes = checked["expected_batch_size"], checked["num_examples"]
    checked["sampling_prob"] = _sampling_prob(mechanism.sampling_prob, *sizes)
    accounting.check_relation(mechanism.neighboring_relation)
    return checked


def _sampling_prob(
    given: float | None, expected_batch_size: float, num_examples: int
) -> float:
    """The sampling probability that was given, or else the one of the sizes."""
    if given is not None and not isinstance(given, ComputedProbability):
        return _validate.probability(
            sampling_prob=given, fix="Use 0.01, for example, or leave it out."
        )
    _validate.require(
        expected_batch_size <= num_examples,
        "expected_batch_size must be at most num_examples",
        expected_batch_size=expected_batch_size,
        num_examples=num_examples,
        fix="Use a smaller batch.",
    )
    return ComputedProbability(expected_batch_size / num_examples)


def calibrated(noise_multiplier: float | None) -> float:
    """The noise multiplier; raises ValueError before calibration."""
    if noise_multiplier is None:
        _validate.fail(
            "the mechanism must have a noise multiplier",
            noise_multiplier=None,
            fix="Use mechanism.calibrate(epsilon=, delta=).",
        )
    return noise_multiplier


def check_nan_safe(nan_safe: bool) -> None:
    """Raises ValueError for a clipped gradient that would void the guarantee."""
    _validate.require(
        nan_safe,
        "a mechanism must have nan_safe=True, so that its guarantee holds",
        nan_safe=False,
        fix="Leave nan_safe out. To look for NaN on public data, use "
        "dpmp.clipped_grad.",
    )


def warn_of_large_delta(delta: float, num_examples: int) -> None:
    """Warns where delta allows that an example is published."""
    if delta >= 1 / num_examples:
        warn(
            "delta should be well below 1 / num_examples, because publishing one "
            f"random example satisfies delta = 1 / num_examples; got delta={delta}. "
            "Use a tenth of 1 / num_examples, or less."
        )
