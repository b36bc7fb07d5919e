"""What `DPSGD` requires of its fields."""

from typing import Any

from dpmp import _validate, accounting


def check_fields(mechanism: Any) -> None:
    """Raises ValueError for a field that is out of range."""
    _validate.positive_integer(
        num_examples=mechanism.num_examples, fix="Count the examples to train on."
    )
    _validate.positive(
        expected_batch_size=mechanism.expected_batch_size, fix="Use 256, for example."
    )
    _validate.require(
        mechanism.expected_batch_size <= mechanism.num_examples,
        "expected_batch_size must be at most num_examples",
        expected_batch_size=mechanism.expected_batch_size,
        num_examples=mechanism.num_examples,
        fix="Use a smaller batch.",
    )
    _validate.positive_integer(
        iterations=mechanism.iterations,
        fix="Use the number of updates, or DPSGD.from_epochs.",
    )
    if mechanism.noise_multiplier is not None:
        _validate.nonnegative(
            noise_multiplier=mechanism.noise_multiplier,
            fix="Leave it out and call calibrate(epsilon=, delta=).",
        )
    if mechanism.delta is not None:
        accounting.check_delta(mechanism.delta)
    accounting.check_relation(mechanism.neighboring_relation)
    _validate.positive_integer(
        num_parameters=mechanism.num_parameters, fix="Count the trainable parameters."
    )
    for name in ("truncated_batch_size", "microbatch_size"):
        if (size := getattr(mechanism, name)) is not None:
            _validate.positive_integer(fix="Use 32, or None.", **{name: size})


def check_num_parameters(num_entries: int, num_parameters: int) -> None:
    """Raises ValueError for a gradient with more entries than are accounted for."""
    _validate.require(
        num_entries <= num_parameters,
        "the gradient must have at most num_parameters entries",
        num_parameters=num_parameters,
        entries=num_entries,
        fix=f"Use DPSGD(num_parameters={num_entries}).",
    )
