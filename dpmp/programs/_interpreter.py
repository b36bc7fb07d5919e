"""Reads a program that jax has traced, and runs it in any interpretation of values."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core

from dpmp._typing import PyTree

CALLS = ("jit", "pjit", "closed_call")
_CUSTOM_VJP = "custom_vjp_call"
CUSTOM_VJP = f"{_CUSTOM_VJP} "
_SCALAR_ARITHMETIC = ("add", "sub", "mul", "lt", "ge", "select_n")
_SCALAR_ARITHMETIC += ("convert_element_type",)


def trace(fun: Callable[..., PyTree], *example_args: Any) -> tuple[Any, Any]:
    """A function as a closed jaxpr of flat arguments, and the tree of its output.

    Calls under `jax.jit` are written out, but for those inside of loops, branches and
    custom derivatives. Index arithmetic on numbers that are known is done.
    """
    closed, out_shape = jax.make_jaxpr(fun, return_shape=True)(*example_args)
    return inline(closed), jax.tree.structure(out_shape)


def inline(closed: Any) -> Any:
    """The closed jaxpr with calls under `jax.jit` written out."""
    return jax.make_jaxpr(functools.partial(_inlined, closed))(*closed.in_avals)


def _inlined(closed: Any, *args: Any) -> list[Any]:
    def evaluate(eqn: Any, values: list[Any]) -> list[Any]:
        if eqn.primitive.name in CALLS:
            return _inlined(callee(eqn), *values)
        if _is_known_number(eqn, values):
            with jax.ensure_compile_time_eval():
                return bind(eqn, values)
        return bind(eqn, values)

    return run(closed, args, evaluate)


def callee(eqn: Any) -> Any:
    """The closed jaxpr of a call."""
    return eqn.params["call_jaxpr" if "call_jaxpr" in eqn.params else "jaxpr"]


def _is_known_number(eqn: Any, values: list[Any]) -> bool:
    return (
        eqn.primitive.name in _SCALAR_ARITHMETIC
        and not any(isinstance(x, jax.core.Tracer) for x in values)
        and all(v.aval.shape == () for v in eqn.outvars)
    )


def run(
    closed: Any, args: Sequence[Any], evaluate: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """Goes through the equations of a closed jaxpr, in any interpretation of values.

    Args:
      closed: closed jaxpr.
      args: the values of its arguments.
      evaluate: `evaluate(eqn, values)` gives the values of an equation's outputs.
        Constants and literals come as they are.

    Returns:
      The values of the outputs.
    """
    jaxpr = closed.jaxpr
    env = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env |= zip(jaxpr.invars, args, strict=True)

    def read(atom: Any) -> Any:
        return atom.val if is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        results = evaluate(eqn, [read(atom) for atom in eqn.invars])
        env |= zip(eqn.outvars, results, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def bind(eqn: Any, values: Sequence[Any], **changed: Any) -> list[Any]:
    """Evaluates an equation, with some of its parameters changed."""
    params = {**eqn.primitive.get_bind_params(eqn.params), **changed}
    results = eqn.primitive.bind(*values, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def is_literal(atom: Any) -> bool:
    """Whether an operand is a number written in the program."""
    return isinstance(atom, jax.extend.core.Literal)


def name(eqn: Any) -> str:
    """Of the primitive; with `CUSTOM_VJP` before it, of a function with such a rule."""
    if eqn.primitive.name != _CUSTOM_VJP:
        return eqn.primitive.name
    body = eqn.params["call_jaxpr"]
    return CUSTOM_VJP + getattr(body, "jaxpr", body).debug_info.func_name
