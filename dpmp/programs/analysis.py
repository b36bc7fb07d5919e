"""Reads programs that jax has traced: their equations, and what depends on what."""

import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpmp.programs import interpreter, primitives


class SubProgram(NamedTuple):
    """A program that an equation runs.

    `invars` has for each of its arguments the operand of the equation, or None if it is
    unknown. `num_consts` and `num_carry` are those of a `Loop`, and 0 for others.
    `length` is the number of iterations, or None if it depends on data. `has_results`
    tells whether the results of the program are those of the equation.
    """

    jaxpr: Any
    invars: Sequence[Any]
    num_consts: int = 0
    num_carry: int = 0
    length: int | None = 1
    has_results: bool = True


def has_body(eqn: Any) -> bool:
    """Whether an equation runs programs of its own: a loop, a branch, a custom rule."""
    return any(
        callable(part) or hasattr(getattr(part, "jaxpr", part), "eqns")
        for part in _parts_of(eqn.params)
        if not isinstance(part, type)
    )


def sub_programs(eqn: Any) -> list[SubProgram]:
    """Lists the programs that an equation runs, without tracing them again."""
    params, operands = eqn.params, list(eqn.invars)
    if eqn.primitive.name == primitives.SCAN:
        jaxpr, counts = params["jaxpr"].jaxpr, interpreter.counts_of_scan(params)
        return [SubProgram(jaxpr, operands, *counts, params["length"])]
    if eqn.primitive.name == primitives.WHILE:
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        cond, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
        carry = operands[num_cond + num_body :]
        inputs = operands[:num_cond] + carry
        return [
            SubProgram(cond, inputs, num_cond, len(carry), None, has_results=False),
            SubProgram(body, operands[num_cond:], num_body, len(carry), None),
        ]
    given = operands[1:] if eqn.primitive.name == primitives.COND else operands
    return [
        SubProgram(
            jaxpr,
            given if len(jaxpr.invars) == len(given) else [None] * len(jaxpr.invars),
            has_results=len(jaxpr.outvars) == len(eqn.outvars),
        )
        for jaxpr in (getattr(part, "jaxpr", part) for part in _parts_of(params))
        if hasattr(jaxpr, "eqns")
    ]


def programs_in(jaxpr: Any) -> list[Any]:
    """Lists a jaxpr, and the jaxprs of all programs in it."""
    inside = (programs_in(x.jaxpr) for eqn in jaxpr.eqns for x in sub_programs(eqn))
    return [jaxpr, *itertools.chain(*inside)]


def equations(jaxpr: Any) -> list[Any]:
    """Lists the equations of a jaxpr, and those of all programs in it."""
    return list(itertools.chain(*(x.eqns for x in programs_in(jaxpr))))


def has_primitive(jaxpr: Any, name: str) -> bool:
    """Whether a jaxpr, or a program in it, has an equation of a primitive."""
    return any(eqn.primitive.name == name for eqn in equations(jaxpr))


def arrays_in(jaxpr: Any) -> list[Any]:
    """Lists the arrays that stand in a jaxpr, and in the programs in it, as literals.

    jax puts arrays there with the option `jax_use_simplified_jaxpr_constants`. They are
    hidden arguments of the compiled program, which its text does not show.
    """
    atoms = (
        atom
        for program in programs_in(jaxpr)
        for some in (*(eqn.invars for eqn in program.eqns), program.outvars)
        for atom in some
    )
    return [x.val for x in atoms if np.ndim(getattr(x, "val", 0))]


def _parts_of(params: dict[str, Any]) -> list[Any]:
    return jax.tree.leaves(params, is_leaf=callable)


def sizes_of_dependents(jaxpr: Any, variables: set[Any]) -> list[int]:
    """The sizes of the arrays in a jaxpr that depend on some of its variables."""
    sizes, (*reads, _) = [], interpreter.variables_read(jaxpr)
    for eqn, read in zip(jaxpr.eqns, reads, strict=True):
        if variables.isdisjoint(read):
            continue
        variables.update(eqn.outvars)
        sizes += [math.prod(getattr(x.aval, "shape", ())) for x in eqn.outvars]
        known = set(read) - variables
        for sub in sub_programs(eqn):
            carry = range(sub.num_consts, sub.num_consts + sub.num_carry)
            inside = {
                x
                for i, x in enumerate(sub.jaxpr.invars)
                if i in carry or not any(x is sub.invars[i] for x in known)
            }
            sizes += sizes_of_dependents(sub.jaxpr, inside)
    return sizes


def reached(jaxpr: Any, unread: Collection[int] = ()) -> set[Any]:
    """The variables that receive cotangents from the outputs of a jaxpr.

    The cotangents of the outputs with numbers in `unread` are zero.
    """
    *read, returned = interpreter.variables_read(jaxpr)
    used = {id(x) for i, x in enumerate(jaxpr.outvars) if i not in unread}
    found = set(filter(_has_gradient, (x for x in returned if id(x) in used)))
    for eqn, variables in reversed(list(zip(jaxpr.eqns, read, strict=True))):
        is_stopped = eqn.primitive.name == primitives.STOP_GRADIENT
        if not is_stopped and not found.isdisjoint(eqn.outvars):
            found.update(filter(_has_gradient, variables))
    return found


def unread_in_loop(loop: interpreter.Loop, unread: Collection[int]) -> set[int]:
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
