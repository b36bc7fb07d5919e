"""The compiled programs of a step: each is made once, for types and shardings.

Before a step runs, its state and batch are checked here, from their types alone.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import _meshes, _validate
from dpmp._arrays import as_device_dtypes, as_mask, is_narrow, without_debugging
from dpmp._meshes import colocated, placement, places
from dpmp._typing import PyTree
from dpmp.programs import analysis, losses
from dpmp.training._agreement import check_same_arrays, check_same_program
from dpmp.training._state import TrainingState
from dpmp.training._step import KEYS, Step
from dpmp.training._tickets import Batch


class Program(NamedTuple):
    """The program of a step for the types and the shardings of its arguments."""

    key: tuple[Any, ...]  # types of the state, types of the batch, shardings
    run: Callable[..., Any]
    constants: list[jax.Array]  # arrays that the loss uses
    calls_host: bool  # whether functions on the host see sensitive values


class Results(NamedTuple):
    """What a step computes. Only the state may be released."""

    state: TrainingState
    outputs: tuple[jax.Array, jax.Array]  # the sensitive losses and norms
    past: tuple[jax.Array, ...]  # secret: what noise of the next step depends on


class Programs:
    """Finds or compiles the program of a step, and runs it."""

    def __init__(self, step: Step):
        self.step = step
        # The programs that have run without an error, by their keys.
        self._compiled: dict[Any, Program] = {}
        # By the structures of states that were checked: the fields that differ.
        self._structures: dict[Any, list[str]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_compiled": {}}  # a program cannot be copied

    def check_structure(self, state: TrainingState) -> None:
        """Raises ValueError for the state of a trainer of another kind."""
        structure = jax.tree.structure(state), _dtypes(state.params)
        if structure not in self._structures:
            self._structures[structure] = self._differences(state)
        if self._structures[structure]:
            _validate.fail(
                "the state must have the arrays that this trainer's init makes. Use "
                "the optimizer, policy, loss scale, clip norm and metrics that the "
                "state was made with.",
                differs=self._structures[structure],
            )

    def _differences(self, state: TrainingState) -> list[str]:
        """The fields of a state whose structure is not that of the first state."""
        try:
            first = jax.eval_shape(self.step.first_state, state.params)
        except Exception:  # an optimizer may need numbers
            return []
        given, wanted = (
            {name: jax.tree.structure(x) for name, x in each._asdict().items()}
            for each in (state._replace(spent=None), first)
        )
        found = [name for name in given if given[name] != wanted[name]]
        if not found and _dtypes(state.params) != _dtypes(first.params):
            found.append("dtypes of params")
        return found

    def prepare(
        self,
        state: TrainingState,
        batch: Batch,
        past: tuple[jax.Array, ...] | None = None,
    ) -> tuple[Program, tuple[Any, ...]]:
        """Finds the program of a step after `past`, and its arguments on devices."""
        with without_debugging():
            examples = as_device_dtypes(batch.examples)
            is_padding = as_mask(is_padding_example=batch.is_padding_example)
            self._check_size(examples, is_padding)
            state = colocated(state._replace(spent=None), examples)
            keys = [jnp.asarray(x) for x in batch.ticket.take(*KEYS)]
            keys = colocated(keys, (state, examples))
            past = self.step.first_past(state) if past is None else past
            return self._program(state, keys, examples, is_padding, past)

    def run(self, program: Program, args: tuple[Any, ...]) -> Results:
        """Runs the step."""
        with without_debugging():
            results = program.run(*args, program.constants)
            self._compiled[program.key] = program
            return Results(*results)

    def _check_size(self, examples: PyTree, is_padding: Any) -> None:
        size = self.step.mechanism.padded_batch_size
        mask = np.empty((), object) if is_padding is None else jax.typeof(is_padding)
        if mask.ndim != 1 or mask.dtype != jnp.bool_:
            _validate.fail(
                "is_padding_example must be a vector of bool. Use True for padding, "
                "and False for examples. Or pass a batch of load_batch, which has it.",
                ndim=mask.ndim,
                dtype=mask.dtype.name,
            )
        sizes = {jnp.shape(x)[:1] for x in jax.tree.leaves((examples, is_padding))}
        # The message does not show the given size: the number of examples is sensitive.
        if sizes != {(size,)}:
            raise _validate.RefusedError(
                f"every batch must be padded to {size} examples; got another number. "
                f"Pad it, and mark the padding in is_padding_example."
            )

    def _program(
        self, state: TrainingState, keys: Any, batch: PyTree, is_padding: Any, past: Any
    ) -> tuple[Program, tuple[Any, ...]]:
        args = state, keys, batch, is_padding, past
        shapes = [str(_meshes.shapes(x)) for x in (state, batch)]
        # The message shows nothing of the batch: its shapes may reveal its content.
        if any(x[0] == shapes[0] and x[1] != shapes[1] for x in self._compiled):
            raise _validate.RefusedError(
                "all batches must have the same tree, shapes and dtypes, because "
                "another compilation would reveal what is in them; got other ones. "
                "Pad examples to one size (see dpmp.Source), and use another DPTrainer "
                "for other data."
            )
        types = str(jax.tree.map(jax.typeof, (state, batch)))
        key = (*shapes, types, placement(args))
        if key in self._compiled:
            return self._compiled[key], args
        step, constants = self.step.make_program(state, batch)
        # Those on one device are copied to all that the step has.
        constants = [colocated(x, args) if places(x) else x for x in constants]
        # Otherwise the state would return from the first step on the devices of the
        # constants, and need another program.
        placed = colocated(args, constants)
        if placement(placed) != placement(args):
            return self._program(*placed)
        traced = step.trace(*args, constants)
        calls_host = losses.calls_host(traced.jaxpr.jaxpr)
        lowered = traced.lower()
        check_same_program(lowered)
        check_same_arrays((state, constants, analysis.arrays_in(traced.jaxpr.jaxpr)))
        compiled = lowered.compile()
        # The function finds the same program without another compilation.
        run = step if any(map(is_narrow, constants)) else compiled
        return Program(key, run, constants, calls_host), args


def _dtypes(params: PyTree) -> tuple[Any, ...]:
    return tuple(x.dtype for x in jax.tree.leaves(params))
