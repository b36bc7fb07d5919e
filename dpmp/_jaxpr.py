"""The one file that knows about jaxprs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core

from dpmp._typing import PyTree


def hoist_constants(
    fun: Callable[..., PyTree], *example_args: Any
) -> tuple[Callable[..., PyTree], list[Any]]:
    """Turns the arrays that `fun` closes over into an argument.

    Compiled as they are, such arrays become part of the program: a frozen model of a
    few gigabytes would be copied into it, and compiled again for every change.

    Args:
      fun: a traceable function.
      *example_args: arguments, or `jax.ShapeDtypeStruct`s, of the only shapes and
        dtypes that the result will accept.

    Returns:
      `hoisted(constants, *args)` and `constants`.
    """
    jaxpr, out_shape = jax.make_jaxpr(fun, return_shape=True)(*example_args)
    out_treedef = jax.tree.structure(out_shape)

    def hoisted(constants: list[Any], *args: Any) -> PyTree:
        closed = jax.extend.core.ClosedJaxpr(jaxpr.jaxpr, constants)
        leaves = jax.extend.core.jaxpr_as_fun(closed)(*jax.tree.leaves(args))
        return jax.tree.unflatten(out_treedef, leaves)

    return hoisted, list(jaxpr.consts)
