"""Checks the fields of a `DPSGD`, and chooses those that were left out."""

from typing import Any

import jax

from dpmp import _validate, accounting
from dpmp._validate import as_real
from dpmp.mechanism._privacy_cost import POISSON, SAMPLINGS
from dpmp.numerics import default_arithmetic, default_method
from dpmp.strategies import BandedInverse, BandedToeplitz

_optional_size = _validate.optional(_validate.positive_integer)
# The check of each field, and the fix that its error message names.
_CHECKS = {
    "num_examples": (_validate.positive_integer, "Count the examples to train on."),
    "expected_batch_size": (_validate.positive, "Use 256, for example."),
    "iterations": (_validate.positive_integer, "Or use DPSGD.from_epochs(epochs=3)."),
    "num_parameters": (_validate.positive_integer, "Count the parameters to train."),
    "rescale_to_unit_norm": (_validate.boolean, "Leave it out for False."),
    "noise_multiplier": (
        _validate.optional(_validate.nonnegative),
        "Leave it out and call calibrate.",
    ),
    "truncated_batch_size": (_optional_size, "Use 32, or None."),
    "microbatch_size": (_optional_size, "Use 32, or None."),
}
# The noise on the number of overflows has 2^14 times as many units, of 2^26 at most.
_WIDEST_NOISE = 2048


class Default(str):
    """The name of a default, which tells a reader more than None.

    `dataclasses.replace` passes it on, and then it is chosen for the new fields.
    """


class ComputedProbability(float):
    """A `sampling_prob` that was computed from other fields; as `Default`."""


def chosen_names(mechanism: Any) -> dict[str, str]:
    """The names of engine and arithmetic, as given or chosen."""
    method, arithmetic = (
        None if isinstance(x, Default) else x
        for x in (mechanism.method, mechanism.arithmetic)
    )
    if method is None:
        has_slots = not mechanism.hides_size
        method = Default(default_method(arithmetic, has_fixed_slots=has_slots))
    if arithmetic is None:
        arithmetic = Default(default_arithmetic(method))
    return {"method": method, "arithmetic": arithmetic}


def check_strategy(mechanism: Any) -> None:
    """Raises ValueError for a strategy that does not fit the other fields."""
    strategy = mechanism.strategy
    if strategy is None or strategy.bands == 1:
        return
    for is_met, required in (
        (mechanism.sampling == POISSON, 'sampling must be "poisson"'),
        (strategy.iterations >= mechanism.iterations, "it must be for all iterations"),
        (
            mechanism._sums.resolution is not None or mechanism.noise_multiplier == 0,
            "arithmetic must have a grid",
        ),
        (mechanism._joint.adaptive is None, "the clip norm must not adapt"),
        (
            isinstance(mechanism.sampling_prob, ComputedProbability),
            "sampling_prob must be left out, because only one group takes part in a "
            "step",
        ),
        (
            not isinstance(strategy, BandedInverse)
            or mechanism.largest_group <= mechanism._largest_batch,
            "truncated_batch_size must be at least the size of a group, because all of "
            "its examples take part",
        ),
        (
            not mechanism.hides_size,
            "examples must have fixed places, and none be added or removed",
        ),
    ):
        if not is_met:
            _validate.fail(
                f"with a strategy, {required}",
                strategy=strategy,
                fix="Change that, or leave strategy out.",
            )
    if not strategy.sensitivity * (mechanism.noise_multiplier or 0.0) <= _WIDEST_NOISE:
        _validate.fail(
            "noise_multiplier, times the sensitivity of the strategy, must be at most "
            f"{_WIDEST_NOISE}. Use a larger epsilon, or fewer steps.",
            noise_multiplier=mechanism.noise_multiplier,
            sensitivity=strategy.sensitivity,
        )


def checked_fields(mechanism: Any) -> dict[str, Any]:
    """Returns Python numbers and bools by name; ValueError if one is out of range."""
    if mechanism.strategy is not None:
        _validate.instance(
            (BandedToeplitz, BandedInverse),
            "Use dpmp.strategies.banded_toeplitz(8, iterations=...).",
            strategy=mechanism.strategy,
        )
    checked: dict[str, Any] = {
        name: check(**{name: getattr(mechanism, name)}, fix=fix)
        for name, (check, fix) in _CHECKS.items()
    }
    if mechanism.delta is not None:
        checked["delta"] = accounting.check_delta(mechanism.delta)
    # `ClipNorms` checks the values of the clip norms.
    checked["l2_clip_norm"] = jax.tree.map(as_real, mechanism.l2_clip_norm)
    if mechanism.sampling not in SAMPLINGS:
        _validate.fail(
            "sampling must be the name of a way to draw batches",
            sampling=mechanism.sampling,
            fix=f"Use one of {SAMPLINGS}.",
        )
    checked["sampling_prob"] = _checked_prob(mechanism, checked)
    accounting.check_relation(mechanism.neighboring_relation)
    return checked


def _checked_prob(mechanism: Any, checked: dict[str, Any]) -> float:
    """The sampling probability that is given, or computed from checked fields."""
    given = mechanism.sampling_prob
    if given is None or isinstance(given, ComputedProbability):
        return ComputedProbability(_computed_prob(mechanism, checked))
    prob = _validate.probability(
        sampling_prob=given, fix="Use 0.01, for example, or leave it out."
    )
    if mechanism.sampling != POISSON and prob != 1 / round(1 / prob):
        _validate.fail(
            "for random allocation, sampling_prob must be 1 over the steps of an epoch",
            sampling_prob=prob,
            fix="Use 1 / 100, for example, or leave it out.",
        )
    return prob


def _computed_prob(mechanism: Any, checked: dict[str, Any]) -> float:
    sizes = {x: checked[x] for x in ("expected_batch_size", "num_examples")}
    batch_size, num_examples = sizes.values()
    if batch_size > num_examples:
        _validate.fail(
            "expected_batch_size must be at most num_examples",
            **sizes,
            fix="Use a smaller batch, unless num_examples counts something else "
            "than examples: for a dict or tuple of arrays, `len` counts the "
            "arrays.",
        )
    if batch_size < 1 and num_examples != 1:
        _validate.fail(
            "expected_batch_size must be a number of examples, and not a share of them",
            expected_batch_size=batch_size,
            fix="For a share, use expected_batch_size=share * num_examples.",
        )
    # Only one of the groups takes part in a step.
    prob = batch_size * mechanism.cycle_length / num_examples
    if isinstance(mechanism.strategy, BandedInverse):
        if mechanism.cycle_length != round(num_examples / batch_size):
            _validate.fail(
                "steps_per_epoch of the strategy must be num_examples over "
                "expected_batch_size, rounded",
                **sizes,
                strategy=mechanism.strategy,
                fix=f"Use {round(num_examples / batch_size)} steps.",
            )
        prob = 1.0
    if not prob <= 1:
        _validate.fail(
            "expected_batch_size must be at most num_examples over the bands",
            **sizes,
            strategy=mechanism.strategy,
            fix="Use a smaller batch, or fewer bands.",
        )
    if mechanism.sampling != POISSON:
        prob = 1 / round(1 / prob)  # an epoch has a whole number of steps
    return prob
