"""Gives a training state its final types and devices before the first step.

jax compiles a step again if an array of the state returns with another dtype, with a
weak type, or on other devices. The functions of this module prevent this, so that a run
needs one compiled program.
"""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from dpmp._typing import PyTree


def strongly_typed(tree: PyTree) -> PyTree:
    """Makes the dtypes of all arrays strong, so that they give way to no other dtype.

    A Python number is weakly typed, and so is an array that was computed from Python
    numbers alone. The array that a step returns in its place need not be.
    """
    return jax.tree.map(_strongly_typed, tree)


def _strongly_typed(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    return jax.lax.convert_element_type(x, x.dtype)


def put_together(tree: PyTree, others: PyTree = ()) -> PyTree:
    """Copies the uncommitted arrays of a tree to the devices of the committed arrays.

    jax may move an uncommitted array to other devices. It leaves a committed array
    where it is.

    Args:
      tree: the arrays to copy.
      others: more arrays, whose devices count if they are committed.

    Returns:
      The tree. It is unchanged if no array is committed.
    """
    home = _home([x.sharding for x in jax.tree.leaves((tree, others)) if _is_placed(x)])
    if home is None:
        return tree
    return jax.tree.map(lambda x: x if _is_placed(x) else jax.device_put(x, home), tree)


def places(tree: PyTree) -> PyTree:
    """The sharding of each committed array and None for others (`out_shardings`)."""
    return jax.tree.map(lambda x: x.sharding if _is_placed(x) else None, tree)


def devices_of(tree: PyTree) -> frozenset[Any]:
    """The devices of all committed arrays; the set may be empty."""
    return frozenset().union(
        *(x.sharding.device_set for x in jax.tree.leaves(tree) if _is_placed(x))
    )


def _home(shardings: list[Sharding]) -> Sharding | None:
    for sharding in shardings:
        if isinstance(sharding, NamedSharding):
            return NamedSharding(sharding.mesh, PartitionSpec())
    return shardings[0] if shardings else None


def _is_placed(x: Any) -> bool:
    """Whether `x` is a committed array, which stays on its devices."""
    is_array = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    return is_array and x.committed
