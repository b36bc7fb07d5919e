"""Checks the fields of `DPSGD`."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from dpmp import _validate, accounting
from dpmp._numbers import as_real


def checked_fields(mechanism: Any) -> dict[str, Any]:
    """Returns the numeric fields as Python numbers, by name.

    Raises:
      ValueError: if a field is out of range.
    """
    checked: dict[str, Any] = {
        name: None if given is None and name in _OPTIONAL else check(**{name: given})
        for name, check in _CHECKS.items()
        for given in [getattr(mechanism, name)]
    }
    _validate.require(
        checked["expected_batch_size"] <= checked["num_examples"],
        "expected_batch_size must be at most num_examples",
        expected_batch_size=mechanism.expected_batch_size,
        num_examples=mechanism.num_examples,
        fix="Use a smaller batch.",
    )
    accounting.check_relation(mechanism.neighboring_relation)
    return {
        **checked,
        # `ClipNorms` checks the values of the clip norms.
        "l2_clip_norm": jax.tree.map(as_real, mechanism.l2_clip_norm),
    }


_OPTIONAL = ("noise_multiplier", "delta", "truncated_batch_size", "microbatch_size")

_CHECKS: dict[str, Callable[..., Any]] = {
    "num_examples": functools.partial(
        _validate.positive_integer, fix="Count the examples to train on."
    ),
    "expected_batch_size": functools.partial(
        _validate.positive, fix="Use 256, for example."
    ),
    "iterations": functools.partial(
        _validate.positive_integer,
        fix="Use the number of updates, or DPSGD.from_epochs.",
    ),
    "noise_multiplier": functools.partial(
        _validate.nonnegative, fix="Leave it out and call calibrate(epsilon=, delta=)."
    ),
    "delta": accounting.check_delta,
    "truncated_batch_size": functools.partial(
        _validate.positive_integer, fix="Use 32, or None."
    ),
    "microbatch_size": functools.partial(
        _validate.positive_integer, fix="Use 32, or None."
    ),
    "num_parameters": functools.partial(
        _validate.positive_integer, fix="Count the trainable parameters."
    ),
}


def check_num_parameters(num_entries: int, num_parameters: int) -> None:
    """Raises ValueError if a gradient has more entries than are accounted for."""
    _validate.require(
        num_entries <= num_parameters,
        "the gradient must have at most num_parameters entries",
        num_parameters=num_parameters,
        entries=num_entries,
        fix=f"Use DPSGD(num_parameters={num_entries}).",
    )
