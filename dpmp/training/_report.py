"""What a run shows while it trains: its method, then privacy, metrics and speed."""

import functools

import jax

from dpmp.training._headline import headline
from dpmp.training._overflows import OverflowNote
from dpmp.training._progress import Progress
from dpmp.training._source import Load
from dpmp.training._spent import SpentPrivacy
from dpmp.training._state import TrainingState
from dpmp.training._step import Step


def report_on(
    step: Step, state: TrainingState, stop: int, load: Load, *, enabled: bool
) -> Progress:
    """Prepares the report on the steps of a run from `state` to `stop`."""
    enabled = enabled and jax.process_index() == 0
    mechanism, size = step.mechanism, step.mechanism.expected_batch_size
    is_dynamic = step.dynamic_scale is not None
    return Progress(
        start=int(state.step),
        stop=stop,
        examples_per_step=size,
        describe_privacy=SpentPrivacy(mechanism, stop).describe if enabled else str,
        headline=functools.partial(headline, step, state, load),
        note=OverflowNote(mechanism.overflow_stddev / size, is_dynamic=is_dynamic),
        enabled=enabled,
    )
