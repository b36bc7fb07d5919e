"""Results that are computed once, whoever reads them.

A compiler may fuse a computation into every one of its readers, doing it anew for each.
An `optimization_barrier` does not help: XLA's CPU compiler takes it out before it
decides what to fuse. What leaves a branch is in memory, and nothing is fused across.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from dpmp._typing import PyTree


def fence(tree: PyTree) -> PyTree:
    """Keeps what was computed apart from what follows, where a compiler heeds it."""
    return jax.lax.optimization_barrier(tree)


def behind_a_branch(compute: Callable[[], PyTree], witness: PyTree) -> PyTree:
    """Computes on one side of a branch that is always taken, whatever the data.

    Args:
      compute: gives a tree of arrays.
      witness: anything with arrays in it, at least one of them not a constant of the
        program: the branch seems to depend on them, and the compiler does not know
        that no integer of 32 bits has 64 bits set.

    Returns:
      What `compute` returns, in memory.
    """
    integer = jnp.zeros((), jnp.uint32)
    leaves = [x for x in jax.tree.leaves(witness) if isinstance(x, jax.Array)]
    if not any(isinstance(x, jax.core.Tracer) for x in (integer, *leaves)):
        return compute()  # one operation after another: nothing is fused
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        firsts = [_first(x) for x in leaves if x.dtype == dtype and _has_numbers(x)]
        if firsts:
            all_firsts = jnp.concatenate(firsts)
            is_any = jnp.any(all_firsts != jnp.zeros_like(all_firsts))
            integer ^= is_any.astype(jnp.uint32)
    compute, restore = _without_repetitions(compute)
    compute = jax.jit(compute)  # so that it is traced once
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
    """`compute`, giving each array once, and what makes its tree from them.

    What leaves a branch twice is there twice.
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
