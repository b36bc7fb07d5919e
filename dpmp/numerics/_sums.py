"""The types that hold a sum of clipped gradients, as the leaves of its tree."""

import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from dpmp._typing import PyTree
from dpmp.numerics._grid import GridArray, check_float, snap
from dpmp.numerics._stored import at_least_float32


class Sum(Protocol):
    """The sum for one array of parameters."""

    @property
    def is_on_grid(self) -> bool:
        """Whether the sum is in integers already."""
        ...

    def to_float(self) -> jax.Array:
        """Returns the sum as one array of floats, float32 or wider."""
        ...

    def snapped(self, unit: float) -> GridArray:
        """Returns the sum in integers: a float sum in rounded multiples of `unit`."""
        ...

    def check_before_noise(self, leaf: int) -> None:
        """Raises ValueError, with the leaf's number, unless this is a valid sum."""
        ...


class _FloatSum(NamedTuple):
    """A `Sum` that is an array of floats."""

    array: Any

    @property
    def is_on_grid(self) -> bool:
        return False

    def to_float(self) -> jax.Array:
        x = jnp.asarray(self.array)
        return x.astype(at_least_float32(x.dtype))

    def snapped(self, unit: float) -> GridArray:
        return snap(jnp.asarray(self.array), unit)

    def check_before_noise(self, leaf: int) -> None:
        check_float(self.array, leaf)


def is_sum(x: Any) -> bool:
    """Whether `x` is an instance of a class of sums, and not a plain array."""
    return isinstance(x, GridArray | _FloatSum)


def as_sum(leaf: Any) -> Sum:
    """Wraps a leaf of a sum of clipped gradients as a `Sum`."""
    return leaf if is_sum(leaf) else _FloatSum(leaf)


def num_entries(sum_of_clipped_grads: PyTree) -> int:
    """Counts the entries of a sum, in any of its types."""
    leaves = jax.tree.leaves(sum_of_clipped_grads, is_leaf=is_sum)
    shapes = (jax.eval_shape(lambda x: as_sum(x).to_float(), x).shape for x in leaves)
    return sum(map(math.prod, shapes))
