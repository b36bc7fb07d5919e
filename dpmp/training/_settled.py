"""Types that a training state has from the first step on, so that one program does.

jax compiles a step anew when an array of the state comes back with another dtype, as a
weakly typed one, or on other devices than it went in with. A state is settled before
its first step, by what is here.
"""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from dpmp._typing import PyTree


def strongly_typed(tree: PyTree) -> PyTree:
    """The same arrays with dtypes that do not give way to others.

    A Python number, and what is computed from nothing but Python numbers, is weakly
    typed; what a step returns in its place need not be.
    """
    return jax.tree.map(_strongly_typed, tree)


def _strongly_typed(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    return jax.lax.convert_element_type(x, x.dtype)


def put_together(tree: PyTree, others: PyTree = ()) -> PyTree:
    """Puts the arrays that have no place of their own where the rest is.

    Args:
      tree: arrays. Those that jax may still move (they are not "committed") are copied
        to all devices of those that it may not.
      others: more arrays that may have a place.

    Returns:
      The tree; nothing is moved where no array has a place.
    """
    home = _home([x.sharding for x in jax.tree.leaves((tree, others)) if _is_placed(x)])
    if home is None:
        return tree
    return jax.tree.map(lambda x: x if _is_placed(x) else jax.device_put(x, home), tree)


def places(tree: PyTree) -> PyTree:
    """For `out_shardings`: where each array is; None for those without a place."""
    return jax.tree.map(lambda x: x.sharding if _is_placed(x) else None, tree)


def devices_of(tree: PyTree) -> frozenset[Any]:
    """The devices that arrays stay on; none where no array has a place."""
    return frozenset().union(
        *(x.sharding.device_set for x in jax.tree.leaves(tree) if _is_placed(x))
    )


def _home(shardings: list[Sharding]) -> Sharding | None:
    for sharding in shardings:
        if isinstance(sharding, NamedSharding):
            return NamedSharding(sharding.mesh, PartitionSpec())
    return shardings[0] if shardings else None


def _is_placed(x: Any) -> bool:
    """Whether `x` has devices that it stays on."""
    is_array = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    return is_array and x.committed
