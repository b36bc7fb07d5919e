"""The one file that knows about jaxprs."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core

from dpmp._typing import PyTree


def hoist_constants(
    fun: Callable[..., PyTree], *example_args: Any
) -> tuple[Callable[..., PyTree], list[Any]]:
    """Turns the arrays that `fun` closes over into an argument.

    Compiled as they are, such arrays become part of the program: a frozen model of a
    few gigabytes would be copied into it, and compiled again for every change. Arrays
    that functions under `jax.jit` close over are found as well. What stays in the
    program is closed over by the rules of a custom derivative, or by a function under
    `jax.jit` inside of a loop or a branch.

    Args:
      fun: a traceable function.
      *example_args: arguments, or `jax.ShapeDtypeStruct`s, of the only shapes and
        dtypes that the result will accept.

    Returns:
      `hoisted(constants, *args)` and `constants`.
    """
    closed, out_shape = jax.make_jaxpr(fun, return_shape=True)(*example_args)
    out_treedef = jax.tree.structure(out_shape)

    def hoisted(constants: list[Any], *args: Any) -> PyTree:
        leaves = _evaluate(closed, iter(constants), jax.tree.leaves(args))
        return jax.tree.unflatten(out_treedef, leaves)

    return hoisted, list(_constants(closed))


def _is_closure(eqn: Any) -> bool:
    """Whether an equation is a call under `jax.jit` with constants inside."""
    return eqn.primitive.name in ("jit", "pjit") and any(
        True for _ in _constants(eqn.params["jaxpr"])
    )


def _constants(closed: Any) -> Iterator[Any]:
    """The constants of a closed jaxpr and of the calls in it, outermost first."""
    yield from closed.consts
    for eqn in closed.jaxpr.eqns:
        if _is_closure(eqn):
            yield from _constants(eqn.params["jaxpr"])


def _evaluate(closed: Any, constants: Iterator[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluates a closed jaxpr with other constants, in the order of `_constants`."""
    jaxpr = closed.jaxpr
    own_constants = [next(constants) for _ in jaxpr.constvars]
    if not any(map(_is_closure, jaxpr.eqns)):
        closed = jax.extend.core.ClosedJaxpr(jaxpr, own_constants)
        return jax.extend.core.jaxpr_as_fun(closed)(*args)
    variables = [*jaxpr.constvars, *jaxpr.invars]
    env = dict(zip(variables, [*own_constants, *args], strict=True))

    def read(atom):
        is_literal = isinstance(atom, jax.extend.core.Literal)
        return atom.val if is_literal else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        if _is_closure(eqn):
            results = _evaluate(eqn.params["jaxpr"], constants, values)
        else:
            params = eqn.primitive.get_bind_params(eqn.params)
            results = eqn.primitive.bind(*values, **params)
            results = results if eqn.primitive.multiple_results else [results]
        env |= dict(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]
