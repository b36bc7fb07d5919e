"""The first line of a run: its method, its microbatches, and how much it trains."""

import contextlib

import jax
import numpy as np

from dpmp.sources import Load
from dpmp.training._state import TrainingState
from dpmp.training._step import Step


def first_line(step: Step, state: TrainingState, load: Load) -> str:
    """Returns the line, which depends on the mechanism and on shapes."""
    mechanism, size = step.mechanism, "as many examples as fit"
    # If the loss or the dataset fails, the first step raises a better error.
    with contextlib.suppress(Exception):
        rows, padded = load(np.zeros(0, np.int64)), mechanism.padded_batch_size
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((padded, *x.shape[1:]), x.dtype), rows
        )
        size = f"up to {step.microbatch_size(state, batch)} of {padded} padded rows"
    why = " (the fastest with a proof)" if mechanism.has_default_method else ""
    num_trained = sum(x.size for x in jax.tree.leaves(state.params))
    return (
        f'method="{mechanism.method}"{why}, arithmetic="{mechanism.arithmetic}", '
        f"{size} at a time, loss in {step.policy.compute_dtype.name}, "
        f"{num_trained:,} entries are trained"
    )
