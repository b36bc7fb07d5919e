"""Compiles a call outside of `jax.jit` as one program; jax would compile dozens."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from dpmp._typing import PyTree


def compiled(fun: Callable[..., Any], argnums: Sequence[int]) -> Callable[..., Any]:
    """Compiles each call of `fun` outside of traced functions as one program.

    The arguments in `argnums` and all arrays are arguments of the program. All other
    values are constants of the program.
    """

    @functools.partial(jax.jit, static_argnums=(2, 3))
    def program(named, arrays, treedef, constants):
        is_padding, *named = named
        arrays, named = iter(arrays), iter(named)
        args, kwargs = treedef.unflatten(
            next(arrays) if kind is None else x for kind, x in constants
        )
        args = [next(named) if i in argnums else x for i, x in enumerate(args)]
        return fun(*args, is_padding_example=is_padding, **kwargs)

    def call(*args, is_padding_example, **kwargs):
        named = [is_padding_example, *(x for i, x in enumerate(args) if i in argnums)]
        others = [None if i in argnums else x for i, x in enumerate(args)], kwargs
        leaves, treedef = jax.tree.flatten(others)
        arrays = [x for x in leaves if isinstance(x, jax.Array)]
        constants = tuple(
            (None, None) if isinstance(x, jax.Array) else (type(x), x) for x in leaves
        )
        if _fits_program((named, arrays), constants):
            return program(named, arrays, treedef, constants)
        return fun(*args, is_padding_example=is_padding_example, **kwargs)

    return call


def _fits_program(arguments: PyTree, constants: Any) -> bool:
    """Whether a function is called with arrays, and with constants that jit can take.

    If an argument is not an array, the function itself raises a better error.
    """
    leaves = jax.tree.leaves(arguments)
    # The loss may close over values that an outer transformation traces.
    if isinstance(jnp.zeros(()), jax.core.Tracer):
        return False
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        return False
    try:
        hash(constants)
        jax.tree.map(jax.typeof, leaves)
    except TypeError:
        return False
    return True
