"""Functions of the same result, whose programs are another one."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core

from dpmp._typing import PyTree
from dpmp.programs._bodies import bind_bodies
from dpmp.programs._interpreter import bind, run, trace


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
    closed, out_treedef = trace(fun, *example_args)

    def hoisted(constants: list[Any], *args: Any) -> PyTree:
        same = jax.extend.core.ClosedJaxpr(closed.jaxpr, constants)
        leaves = jax.extend.core.jaxpr_as_fun(same)(*jax.tree.leaves(args))
        return jax.tree.unflatten(out_treedef, leaves)

    return hoisted, list(closed.consts)


def rewrite(
    fun: Callable[..., PyTree],
    replace: Callable[[Any, list[Any]], list[Any] | None],
) -> Callable[..., PyTree]:
    """A function some of whose equations are evaluated in another way.

    Args:
      fun: a traceable function that need not be differentiated any more.
      replace: `replace(eqn, values)` gives the values of an equation's outputs, of the
        shapes and dtypes that they had, or None to leave it as it is. It is asked about
        the equations inside of loops and branches too.

    Returns:
      A function of the same arguments.
    """

    def run_body(body: Any, values: Sequence[Any]) -> list[Any]:
        transposed: dict[Any, list[Any]] = {}

        def evaluate(eqn: Any, values: list[Any]) -> list[Any]:
            if (results := replace(eqn, values)) is not None:
                return results
            if eqn.primitive.name != "transpose":
                return bind_bodies(eqn, values, run_body)
            # `jax.vmap` does so for each output, though a loop stacks them once. What
            # can be read again is alive until the end of `run`, and its id its own.
            key = id(values[0]), tuple(eqn.params["permutation"])
            if key not in transposed:
                transposed[key] = bind(eqn, values)
            return transposed[key]

        return run(body, values, evaluate)

    def rewritten(*args: Any) -> PyTree:
        closed, out_shape = jax.make_jaxpr(fun, return_shape=True)(*args)
        leaves = run_body(closed, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out_shape), leaves)

    return rewritten
