"""Gives a training state its final types and devices before the first step.

Otherwise jax compiles a step again, because an array of the state returns with another
dtype, with a weak type, or on other devices.
"""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from dpmp._typing import PyTree


def strongly_typed(tree: PyTree) -> PyTree:
    """Makes the dtypes of all arrays strong, so that they give way to no other dtype.

    A Python number is weakly typed, and so is an array that was computed from Python
    numbers alone. The array that a step returns in its place need not be.
    """

    def make_strong(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.extended)
        return x if is_key else jax.lax.convert_element_type(x, x.dtype)

    return jax.tree.map(make_strong, tree)


def colocated(tree: PyTree, others: PyTree = ()) -> PyTree:
    """Copies the arrays of a tree without a place to the devices of those with one.

    An array has a place if it is committed: jax leaves it on its devices, and may move
    the others. The places of `others` count, too. Without any, the tree is unchanged.
    """
    placed = [x.sharding for x in jax.tree.leaves((tree, others)) if _is_committed(x)]
    if not placed:
        return tree
    meshes = [x.mesh for x in placed if isinstance(x, jax.NamedSharding)]
    home = jax.NamedSharding(meshes[0], jax.P()) if meshes else placed[0]
    return jax.tree.map(lambda x: x if _is_committed(x) else _put(x, home), tree)


def _put(x: Any, home: jax.sharding.Sharding) -> jax.Array:
    """Copies an array that all processes of a job have to all of their devices."""
    if home.is_fully_addressable:
        return jax.device_put(x, home)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        words = _put(jax.random.key_data(x), home)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    values = np.asarray(x)
    return jax.make_array_from_callback(x.shape, home, lambda part: values[part])


def places(tree: PyTree) -> PyTree:
    """The sharding of each committed array and None for others (`out_shardings`).

    A shape has the sharding that it was given, or None.
    """

    def place(x: Any) -> Any:
        has_sharding = _is_committed(x) or isinstance(x, jax.ShapeDtypeStruct)
        return x.sharding if has_sharding else None

    return jax.tree.map(place, tree)


def placement(tree: PyTree) -> tuple[Any, ...]:
    """The shardings of all arrays, or None, in a tuple that a dict can look up."""
    return tuple(
        x.sharding if _is_committed(x) else None for x in jax.tree.leaves(tree)
    )


def _is_committed(x: Any) -> bool:
    is_array = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    return is_array and x.committed
