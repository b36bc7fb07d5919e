"""Reads programs that jax has traced, and runs them on values of any kind."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core
import jax.extend.source_info_util

from dpmp._typing import PyTree
from dpmp.programs import primitives

# Evaluates an equation on values; None leaves it as it is.
Rule = Callable[[Any, list[Any]], list[Any] | None]

CUSTOM_VJP = f"{primitives.CUSTOM_VJP} "


def trace(fun: Callable[..., PyTree], *example_args: Any) -> tuple[Any, Any]:
    """Traces a function to a closed jaxpr, and returns the tree of its output too.

    The jaxpr takes flat arguments. Calls under `jax.jit` are written out, except inside
    of loops, branches and custom derivatives. Index arithmetic on known numbers is
    evaluated, and of a condition on a known number the branch that it takes remains.
    """
    closed, out_shape = jax.make_jaxpr(fun, return_shape=True)(*example_args)
    return inline(closed), jax.tree.structure(out_shape)


def inline(closed: Any) -> Any:
    """Writes out the calls under `jax.jit` in a closed jaxpr."""
    return jax.make_jaxpr(functools.partial(_inlined, closed))(*closed.in_avals)


def _inlined(closed: Any, *args: Any) -> list[Any]:
    def evaluate(eqn: Any, values: list[Any]) -> list[Any]:
        if eqn.primitive.name in primitives.CALLS:
            return _inlined(callee(eqn), *values)
        if eqn.primitive.name == primitives.COND and _is_known(values[0]):
            branches = eqn.params["branches"]
            number = min(max(int(values[0]), 0), len(branches) - 1)
            return _inlined(branches[number], *values[1:])
        if _is_known_number(eqn, values):
            with jax.ensure_compile_time_eval():
                return bind(eqn, values)
        # The new equation gets the source line of the old one.
        with jax.extend.source_info_util.user_context(eqn.source_info.traceback):
            return bind(eqn, values)

    return run(closed, args, evaluate)


def callee(eqn: Any) -> Any:
    """Returns the closed jaxpr of a call."""
    return eqn.params["call_jaxpr" if "call_jaxpr" in eqn.params else "jaxpr"]


def _is_known_number(eqn: Any, values: list[Any]) -> bool:
    return (
        eqn.primitive.name in primitives.OF_INDICES
        and all(map(_is_known, values))
        and all(v.aval.shape == () for v in eqn.outvars)
    )


def _is_known(value: Any) -> bool:
    return not isinstance(value, jax.core.Tracer)


def run(closed: Any, args: Sequence[Any], evaluate: Rule) -> list[Any]:
    """Runs the equations of a closed jaxpr on values of any kind; returns the outputs.

    `evaluate(eqn, values)` returns the values of an equation's outputs, or None to
    evaluate the equation as it is. Constants and literals are passed unchanged.
    """
    jaxpr = closed.jaxpr
    env = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env |= zip(jaxpr.invars, args, strict=True)

    def read(atom: Any) -> Any:
        return atom.val if is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        results = evaluate(eqn, values)
        results = bind(eqn, values) if results is None else results
        env |= zip(eqn.outvars, results, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def bind(eqn: Any, values: Sequence[Any], **changed: Any) -> list[Any]:
    """Evaluates an equation, with some of its parameters changed."""
    params = {**eqn.primitive.get_bind_params(eqn.params), **changed}
    results = eqn.primitive.bind(*values, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def is_literal(atom: Any) -> bool:
    """Whether an operand is a literal, a number in the text of the program."""
    return isinstance(atom, jax.extend.core.Literal)


def variables_read(jaxpr: Any) -> list[list[Any]]:
    """The variables that each equation reads, and last those that are returned."""
    atoms = [*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars]
    return [[x for x in some if not is_literal(x)] for some in atoms]


def name(eqn: Any) -> str:
    """The name of the primitive, or `CUSTOM_VJP` and the name of the function."""
    if eqn.primitive.name != primitives.CUSTOM_VJP:
        return eqn.primitive.name
    body = eqn.params["call_jaxpr"]
    return CUSTOM_VJP + getattr(body, "jaxpr", body).debug_info.func_name
