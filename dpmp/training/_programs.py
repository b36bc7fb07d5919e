"""Compiles the step, once for a whole run."""

from typing import Any

import jax
import jax.numpy as jnp

from dpmp._typing import PyTree
from dpmp.training._settled import devices_of, put_together
from dpmp.training._state import TrainingState
from dpmp.training._step import Step


class Programs:
    """The compiled programs of a step, one for each combination of types and devices.

    The state that a program returns is on the devices that the program was made for.
    """

    def __init__(self, step: Step):
        self._step = step
        self._compiled: dict[Any, tuple[str, jax.stages.Wrapped, list[Any]]] = {}

    def run(
        self, state: TrainingState, batch: PyTree, is_padding: Any
    ) -> tuple[TrainingState, tuple[jax.Array, jax.Array]]:
        """Runs the step; returns the new state and the sensitive losses and norms."""
        # jax's debug flags look at all arrays, those of the batch and the results. They
        # would show in an exception that an example, or its gradient, is not finite.
        with jax.debug_nans(False), jax.debug_infs(False):
            size = self._step.mechanism.padded_batch_size
            sizes = {jnp.shape(x)[:1] for x in jax.tree.leaves((batch, is_padding))}
            # The message does not show the given size: the number of examples is
            # sensitive.
            if sizes != {(size,)}:
                raise ValueError(
                    f"every batch must be padded to {size} examples; got another "
                    f"number. Pad it, and mark the padding in is_padding_example."
                )
            batch = jax.tree.map(jnp.asarray, batch)
            state = put_together(state, batch)
            types, of_batch = (str(jax.tree.map(jax.typeof, x)) for x in (state, batch))
            of_state = types, devices_of(state)
            compiled = self._compiled.get(of_state)
            compiled = compiled or (of_batch, *self._step.make_program(state, batch))
            compiled_for, program, constants = compiled
            # The message shows nothing of the batch: its shapes may reveal its content.
            if of_batch != compiled_for:
                raise ValueError(
                    "all batches must have the same tree, shapes and dtypes, because "
                    "another compilation would reveal what is in them; got other ones. "
                    "Pad examples to one size (see dpmp.training.Source), and use "
                    "another DPTrainer for other data."
                )
            outputs = program(state, batch, jnp.asarray(is_padding), constants)
            # Only a program that ran is worth keeping.
            self._compiled[of_state] = compiled
            return outputs
