"""Makes the compiler compute a result once and store it, so that all read the same.

A compiler may fuse a computation into each operation that reads its result. It then
repeats the computation for each reader. The repetitions may differ: it may contract a
product into an addition in one place and not in the other, or use the float32 number
from which a 16-bit value was rounded. A norm would then belong to other numbers than
the sum. An `optimization_barrier` does not help: XLA's CPU compiler removes it before
it decides what to fuse. The results of a branch (`jax.lax.cond`) are always stored in
memory, and nothing is fused across its end.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
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

    `depends_on` has an array that is not a constant of the program. From such arrays,
    the condition of the branch is computed, and the compiler cannot tell that it is
    always true (a 32-bit integer never has 64 bits set).
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
    """Makes `compute` store no array twice; the other function restores its tree."""
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


@dataclass(frozen=True)
class StoredArray:
    """A stack of per-example arrays, flattened, as one leaf of a pytree."""

    # The entries, (B, n), as uint16 for 16-bit floats: integers stop XLA from computing
    # slices from a float32 copy of the whole stack.
    bits: jax.Array
    dtype: Any  # of the floats
    shape: tuple[int, ...]  # of one example


def floats_of(bits: jax.Array, dtype: Any) -> jax.Array:
    """Converts stored bits to floats of 32 bits or more."""
    if dtype == jnp.bfloat16:  # the upper half of a float32
        return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)
    if bits.dtype != dtype:
        bits = jax.lax.bitcast_convert_type(bits, dtype)
    return bits.astype(at_least_float32(dtype))


def at_least_float32(*dtypes: Any) -> Any:
    """The widest float dtype among float32 and the given dtypes."""
    floats = [d for d in map(jnp.dtype, dtypes) if jnp.issubdtype(d, jnp.floating)]
    return max((jnp.dtype(jnp.float32), *floats), key=lambda d: d.itemsize)


def compute_and_store(
    compute: Callable[[], tuple[PyTree, PyTree]], depends_on: PyTree
) -> tuple[PyTree, PyTree]:
    """Makes `StoredArray`s, by `materialize`, of the first result: arrays (B, ...)."""
    compute = jax.jit(compute)  # so that it is traced once
    shapes, _ = jax.eval_shape(compute)

    def compute_bits():
        grads, rest = compute()
        return jax.tree.map(_to_bits, grads), rest

    bits, rest = materialize(compute_bits, depends_on)
    stored = jax.tree.map(
        lambda x, s: StoredArray(x, s.dtype, s.shape[1:]), bits, shapes
    )
    return stored, rest


def _to_bits(x: jax.Array) -> jax.Array:
    x = x.reshape(x.shape[0], math.prod(x.shape[1:]))
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x
