"""Tells which values of a program a backward pass sends cotangents to."""

from collections.abc import Collection
from typing import Any

import jax.numpy as jnp

from dpmp.programs import primitives
from dpmp.programs.bodies import Loop
from dpmp.programs.interpreter import variables_read


def reached(jaxpr: Any, unread: Collection[int] = ()) -> set[Any]:
    """The variables that receive cotangents from the outputs of a jaxpr.

    The cotangents of the outputs with numbers in `unread` are zero.
    """
    *read, returned = variables_read(jaxpr)
    used = {id(x) for i, x in enumerate(jaxpr.outvars) if i not in unread}
    found = set(filter(_has_gradient, (x for x in returned if id(x) in used)))
    for eqn, variables in reversed(list(zip(jaxpr.eqns, read, strict=True))):
        is_stopped = eqn.primitive.name == primitives.STOP_GRADIENT
        if not is_stopped and not found.isdisjoint(eqn.outvars):
            found.update(filter(_has_gradient, variables))
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


def _has_gradient(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.inexact)
