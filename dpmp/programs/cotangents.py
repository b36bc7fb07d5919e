"""Tells which values of a program a backward pass sends cotangents to."""

from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp

from dpmp.programs import primitives
from dpmp.programs.bodies import Loop
from dpmp.programs.interpreter import is_literal


def reached(jaxpr: Any, unread: Collection[int] = ()) -> set[Any]:
    """The variables that receive cotangents from the outputs of a jaxpr.

    The cotangents of the outputs with numbers in `unread` are zero.
    """
    found = _with_gradients(
        [atom for i, atom in enumerate(jaxpr.outvars) if i not in unread]
    )
    for eqn in reversed(jaxpr.eqns):
        is_stopped = eqn.primitive.name == primitives.STOP_GRADIENT
        if not is_stopped and not found.isdisjoint(eqn.outvars):
            found |= _with_gradients(eqn.invars)
    return found


def unread_in_loop(loop: Loop, unread: Collection[int]) -> set[int]:
    """The outputs of a loop's body whose cotangents are zero in every iteration.

    `unread` has the outputs of the loop whose cotangents are zero. An output that is
    carried to an iteration that reads it is not one of them.
    """
    body, unread = loop.body.jaxpr, set(unread)
    carried = body.invars[loop.num_consts :][: loop.num_carry]
    while True:
        found = reached(body, unread)
        read = {i for i in unread & set(range(loop.num_carry)) if carried[i] in found}
        if not read:
            return unread
        unread -= read


def _with_gradients(atoms: Sequence[Any]) -> set[Any]:
    return {
        x
        for x in atoms
        if not is_literal(x) and jnp.issubdtype(x.aval.dtype, jnp.inexact)
    }
