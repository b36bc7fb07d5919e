"""The first line of a run: its method, its microbatches, and how much it trains."""

import contextlib

import jax
import numpy as np

from dpmp._typing import PyTree
from dpmp.programs import bodies, interpreter, losses
from dpmp.sources import Load
from dpmp.training._state import TrainingState
from dpmp.training._step import Step


def first_line(step: Step, state: TrainingState, load: Load) -> str:
    """Returns the line, which depends on the mechanism and on shapes."""
    mechanism, size = step.mechanism, "as many examples as fit"
    policy = step.policy
    computed_in = policy.compute_dtype.name
    # If the loss or the dataset fails, the first step raises a better error.
    with contextlib.suppress(Exception):
        rows, padded = load(np.zeros(0, np.int64)), mechanism.padded_batch_size
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((padded, *x.shape[1:]), x.dtype), rows
        )
        size = f"up to {step.microbatch_size(state, batch)} of {padded} padded rows"
        computed_in += _share_of_products(step, state, batch)
    computed_in += policy.shown_products
    why = " (the fastest with a proof)" if mechanism.has_default_method else ""
    num_trained = sum(x.size for x in jax.tree.leaves(state.params))
    return (
        f'method="{mechanism.method}"{why}, arithmetic="{mechanism.arithmetic}", '
        f"{size} at a time, loss in {computed_in}, "
        f"{num_trained:,} entries are trained"
    )


def _share_of_products(step: Step, state: TrainingState, batch: PyTree) -> str:
    """How many products of the loss a policy of 16 bits has, if it has not all."""
    if step.policy.compute_dtype.itemsize > 2:
        return ""
    args = step.loss_shapes(state, batch, rows=slice(1))
    jaxpr, _ = interpreter.trace(step.loss_fn, *args)
    narrow = losses.are_narrow(bodies.equations(jaxpr.jaxpr))
    return "" if all(narrow) else f" ({sum(narrow)} of {len(narrow)} products)"
