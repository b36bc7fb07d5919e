"""Makes the compiler compute a result once and store it.

A compiler may fuse a computation into each operation that reads its result. It then
repeats the computation for each reader. An `optimization_barrier` does not help: XLA's
CPU compiler removes it before it decides what to fuse. The results of a branch
(`jax.lax.cond`) are always stored in memory, and nothing is fused across its end.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from dpmp._typing import PyTree


def fence(tree: PyTree) -> PyTree:
    """Stops a compiler that respects optimization barriers from fusing across here."""
    return jax.lax.optimization_barrier(tree)


def materialize(compute: Callable[[], PyTree], depends_on: PyTree) -> PyTree:
    """Computes once and stores the result: XLA does not fuse across `lax.cond`.

    Args:
      compute: returns a tree of arrays.
      depends_on: a tree with at least one array that is not a constant of the program.
        The condition of the branch is computed from these arrays, and the compiler
        cannot tell that it is always true (a 32-bit integer never has 64 bits set).

    Returns:
      The output of `compute`, stored in memory.
    """
    integer = jnp.zeros((), jnp.uint32)
    leaves = [x for x in jax.tree.leaves(depends_on) if isinstance(x, jax.Array)]
    if not any(isinstance(x, jax.core.Tracer) for x in (integer, *leaves)):
        return compute()  # nothing is fused where operations run one by one
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        firsts = [_first(x) for x in leaves if x.dtype == dtype and _has_numbers(x)]
        if firsts:
            all_firsts = jnp.concatenate(firsts)
            is_any = jnp.any(all_firsts != jnp.zeros_like(all_firsts))
            integer ^= is_any.astype(jnp.uint32)
    compute, restore = _without_repetitions(compute)
    compute = jax.jit(compute)  # jit traces it only once
    shapes = jax.eval_shape(compute)
    return restore(
        jax.lax.cond(
            jax.lax.population_count(integer) < 64,
            compute,
            lambda: [jnp.zeros(x.shape, x.dtype) for x in shapes],
        )
    )


def _has_numbers(x: jax.Array) -> bool:
    return x.size > 0 and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _first(x: jax.Array) -> jax.Array:
    """The first entry: (1,)."""
    return jax.lax.slice(x, [0] * x.ndim, [1] * x.ndim).reshape(1)


def _without_repetitions(
    compute: Callable[[], PyTree],
) -> tuple[Callable[[], list[Any]], Callable[[list[Any]], PyTree]]:
    """Makes `compute` return each array once, with a function that restores its tree.

    A branch stores an array twice if it returns it twice.
    """
    found = []

    def compute_once() -> list[Any]:
        leaves, treedef = jax.tree.flatten(compute())
        arrays = {id(x): x for x in leaves}
        numbers = {key: i for i, key in enumerate(arrays)}
        found[:] = [treedef, [numbers[id(x)] for x in leaves]]
        return list(arrays.values())

    def restore(arrays: list[Any]) -> PyTree:
        treedef, places = found
        return treedef.unflatten(arrays[i] for i in places)

    return compute_once, restore
