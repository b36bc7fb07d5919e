"""The first line of a run: its method, its arithmetic, and a cheaper method if any.

The line depends on the mechanism and on the shapes of parameters and of an example.
"""

import contextlib
import dataclasses

import jax
import numpy as np

from dpmp.sources import Load
from dpmp.training._state import TrainingState
from dpmp.training._step import Step

# The estimate of the running time is accurate to a factor of two only.
_MUCH_CHEAPER = 0.5

# Below this many entries of gradients in a batch, clipping takes a millisecond or two
# on one core. Loading, noise and update take as long, with both methods.
_WORTH_TELLING = 2**20


def first_line(step: Step, state: TrainingState, load: Load) -> str:
    """Returns the line; it names the other method only if that is much cheaper."""
    mechanism, policy = step.mechanism, step.policy
    line = (
        f'method="{mechanism.method}", arithmetic="{mechanism.arithmetic}", '
        f"loss in {policy.compute_dtype.name}"
    )
    num_entries = sum(x.size for x in jax.tree.leaves(state.params))
    is_small = num_entries * mechanism.padded_batch_size < _WORTH_TELLING
    if mechanism.method != "per_example" or is_small:
        return line
    # If the loss or the dataset fails, the first step raises a better error.
    with contextlib.suppress(Exception):
        other = dataclasses.replace(mechanism, method="book_keeping", arithmetic=None)
        rows = load(np.zeros(0, np.int64))
        example = jax.tree.map(lambda x: np.zeros((1, *x.shape[1:]), x.dtype), rows)
        share = step.cost_of_book_keeping(state, example)
        if share <= _MUCH_CHEAPER:
            line += (
                f". By an estimate from shapes, a step costs {share:.0%} of this with "
                f'DPSGD(method="book_keeping"), whose sums are "{other.arithmetic}" '
                "(docs/book_keeping.md)"
            )
    return line
