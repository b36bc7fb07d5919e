"""Checks the arguments of the accounting functions."""

from typing import Any

import dp_accounting

from dpmp import _validate
from dpmp._validate import as_real

# By default, one example of the first dataset is replaced by padding in the second.
DEFAULT_RELATION = dp_accounting.NeighboringRelation.REPLACE_SPECIAL

# The check of each argument, and the fix that its error message names.
_CHECKS = {
    "noise_multiplier": (_validate.nonnegative, "Use calibrate_noise_multiplier."),
    "sampling_prob": (_validate.probability, "Use expected_batch_size / num_examples."),
    "iterations": (_validate.nonnegative_integer, "Use the number of updates."),
    "num_examples": (_validate.positive_integer, "Count the examples to train on."),
    "truncated_batch_size": (_validate.positive_integer, "Use 32, for example."),
    "multiple_of": (_validate.positive_integer, "Use the microbatch size, or 1."),
    "epsilon": (_validate.positive, "Use 8, for example."),
}


def check(**values: Any) -> list[Any]:
    """Returns the values as Python numbers; raises ValueError for invalid values."""
    return [
        _CHECKS[name][0](**{name: x}, fix=_CHECKS[name][1])
        for name, x in values.items()
    ]


def check_delta(delta: float) -> float:
    """Returns `delta` as a `float`; raises ValueError unless it is in (0, 1)."""
    value = as_real(delta)
    _validate.require(
        _validate.is_real(value) and 0 < value < 1,
        "delta must be in (0, 1)",
        delta=delta,
        fix="Use a value well below 1 / num_examples.",
    )
    return value


def required_delta(delta: float | None) -> float:
    """Returns `delta` as `check_delta` does; raises ValueError if there is none."""
    if delta is None:
        _validate.fail(
            "epsilon must be computed for a given delta",
            delta=None,
            fix="Pass delta=, well below 1 / num_examples.",
        )
    return check_delta(delta)


def check_relation(neighboring_relation: dp_accounting.NeighboringRelation) -> None:
    """Raises TypeError unless the argument is a relation of dp_accounting."""
    _validate.require(
        isinstance(neighboring_relation, dp_accounting.NeighboringRelation),
        "neighboring_relation must be a dp_accounting.NeighboringRelation",
        neighboring_relation=neighboring_relation,
        fix="Use dp_accounting.NeighboringRelation.REPLACE_SPECIAL, for example.",
        error=TypeError,
    )
