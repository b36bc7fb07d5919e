"""The compiled programs of a step, one for each combination of types and shardings."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from dpmp import _meshes, _validate
from dpmp._meshes import placement
from dpmp._typing import PyTree
from dpmp.programs import losses


class Program(NamedTuple):
    """The program of a step for the types and the shardings of its arguments."""

    key: tuple[Any, ...]  # types of the state, types of the batch, shardings
    compiled: jax.stages.Compiled
    constants: list[jax.Array]  # arrays that the loss uses
    calls_host: bool  # whether functions on the host see sensitive values


class Programs:
    """The programs that have run without an error."""

    def __init__(self):
        self._known: dict[tuple[Any, ...], Program] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Programs, ()  # a compiled program cannot be copied

    def find(
        self,
        args: tuple[Any, ...],
        make: Callable[[PyTree, PyTree], tuple[jax.stages.Wrapped, list[jax.Array]]],
    ) -> Program:
        """The program for a state, keys, a batch and its padding.

        `make` returns the function to compile for a state and a batch, and the arrays
        of the loss, which are its last argument.
        """
        state, _, batch, _ = args
        shapes = [str(_meshes.shapes(x)) for x in (state, batch)]
        # The message shows nothing of the batch: its shapes may reveal its content.
        if any(x[0] == shapes[0] and x[1] != shapes[1] for x in self._known):
            raise _validate.RefusedError(
                "all batches must have the same tree, shapes and dtypes, because "
                "another compilation would reveal what is in them; got other ones. "
                "Pad examples to one size (see dpmp.Source), and use "
                "another DPTrainer for other data."
            )
        types = str(jax.tree.map(jax.typeof, (state, batch)))
        key = (*shapes, types, placement(args))
        if key in self._known:
            return self._known[key]
        step, constants = make(state, batch)
        traced = step.trace(*args, constants)
        calls_host = losses.calls_host(traced.jaxpr.jaxpr)
        return Program(key, traced.lower().compile(), constants, calls_host)

    def run(self, program: Program, args: tuple[Any, ...]) -> Any:
        """Runs a program, and remembers it if it does not fail."""
        results = program.compiled(*args, program.constants)
        self._known[program.key] = program
        return results
