"""The compiled programs of a step, one for each combination of types and shardings."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from dpmp import _validate
from dpmp._placement import placement
from dpmp._typing import PyTree
from dpmp.programs import _check_program


@dataclass(eq=False)
class Program:
    """The program of a step for the types and the shardings of its arguments.

    Attributes:
      of_state: the types of the state.
      of_batch: the types of the batch.
      placed: the shardings of the arguments.
      lowered: the program.
      constants: arrays that the loss uses.
      calls_host: whether it calls functions on the host, which see sensitive values.
      has_run: whether it ran without an error.
    """

    of_state: str
    of_batch: str
    placed: tuple[Any, ...]
    lowered: jax.stages.Lowered
    constants: list[jax.Array]
    calls_host: bool
    has_run: bool = False

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        """The compiled program."""
        return self.lowered.compile()


class Programs:
    """The programs that were traced, each of them once."""

    def __init__(self):
        self._programs: list[Program] = []

    def find(
        self,
        args: tuple[Any, ...],
        make: Callable[[PyTree, PyTree], tuple[jax.stages.Wrapped, list[jax.Array]]],
    ) -> Program:
        """The program for a state, keys, a batch and its padding.

        `make` returns the function to compile for a state and a batch, and the arrays
        of the loss, which are its last argument.

        Raises:
          ValueError: if an earlier batch with such a state had other types.
        """
        state, _, batch, _ = args
        of_state, of_batch = (str(jax.tree.map(jax.typeof, x)) for x in (state, batch))
        placed = placement(args)
        same_state = [x for x in self._programs if x.of_state == of_state]
        # The message shows nothing of the batch: its shapes may reveal its content.
        if any(x.of_batch != of_batch for x in same_state):
            raise _validate.RefusedError(
                "all batches must have the same tree, shapes and dtypes, because "
                "another compilation would reveal what is in them; got other ones. "
                "Pad examples to one size (see dpmp.Source), and use "
                "another DPTrainer for other data."
            )
        for program in same_state:
            if program.placed == placed:
                return program
        step, constants = make(state, batch)
        traced = step.trace(*args, constants)
        calls_host = _check_program.calls_host(traced.jaxpr.jaxpr)
        program = Program(
            of_state, of_batch, placed, traced.lower(), constants, calls_host
        )
        self._programs.append(program)
        return program

    def run(self, program: Program, args: tuple[Any, ...]) -> Any:
        """Runs a program; one that fails at its first run decides nothing any more."""
        try:
            results = program.compiled(*args, program.constants)
        except BaseException:
            # Other batches may run, for example of shorter examples.
            if not program.has_run:
                self._programs.remove(program)
            raise
        program.has_run = True
        return results
