"""Rewrites the program of a function without changing its result."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
import numpy as np

from dpmp._typing import PyTree
from dpmp.programs._bodies import bind_bodies
from dpmp.programs._interpreter import bind, run, trace


def hoist_constants(
    fun: Callable[..., PyTree],
    *example_args: Any,
    check: Callable[[Any], None] = lambda program: None,
) -> tuple[Callable[..., PyTree], list[Any]]:
    """Turns the arrays that `fun` closes over into an argument.

    Without this, the compiler makes such arrays part of the program. A frozen model of
    a few gigabytes would be copied into the program, and every change of it would need
    a new compilation. Arrays that functions under `jax.jit` close over are found too.
    Two kinds of arrays stay in the program: those in the rules of a custom derivative,
    and those in a function under `jax.jit` inside of a loop or a branch.

    `check` is called with the program, a jaxpr, and may raise an exception.

    Returns `hoisted(constants, *args)` and `constants`. It accepts the shapes and
    dtypes of the example arguments only.
    """
    closed, out_treedef = trace(fun, *example_args)
    check(closed.jaxpr)

    def hoisted(constants: list[Any], *args: Any) -> PyTree:
        same = jax.extend.core.ClosedJaxpr(closed.jaxpr, constants)
        leaves = jax.extend.core.jaxpr_as_fun(same)(*jax.tree.leaves(args))
        return jax.tree.unflatten(out_treedef, leaves)

    # A NumPy array may be changed in place, and jax would notice it at any time.
    return hoisted, [
        np.array(x) if isinstance(x, np.ndarray) else x for x in closed.consts
    ]


def rewrite(
    fun: Callable[..., PyTree],
    replace: Callable[[Any, list[Any]], list[Any] | None],
) -> Callable[..., PyTree]:
    """Makes a function in which some equations are evaluated in another way.

    `replace(eqn, values)` returns the values of an equation's outputs, in the same
    shapes and dtypes, or None to leave the equation as it is. It is also called for the
    equations inside of loops and branches. The result need not be differentiable.
    """

    def run_body(body: Any, values: Sequence[Any]) -> list[Any]:
        transposed: dict[Any, list[Any]] = {}

        def evaluate(eqn: Any, values: list[Any]) -> list[Any]:
            if (results := replace(eqn, values)) is not None:
                return results
            if eqn.primitive.name != "transpose":
                return bind_bodies(eqn, values, run_body)
            # `jax.vmap` transposes each output anew, though a loop stacks them once.
            # The values in `transposed` stay alive until the end of `run`, so no id is
            # used twice.
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
