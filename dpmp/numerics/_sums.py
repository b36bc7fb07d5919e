"""What a sum of clipped gradients is written down in: the leaves of its tree."""

import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from dpmp._typing import PyTree
from dpmp.numerics._double_words import DoubleWord
from dpmp.numerics._grid import GridArray, check_float, snap
from dpmp.numerics._stored import at_least_float32


class Sum(Protocol):
    """The sum for one array of parameters."""

    @property
    def is_on_grid(self) -> bool:
        """Whether it is in integers already."""
        ...

    def words(self) -> tuple[jax.Array, jax.Array | None]:
        """The sum in floats, and what is to be added to it, if anything."""
        ...

    def to_float(self) -> jax.Array:
        """The sum as one array of floats, float32 or wider."""
        ...

    def snapped(self, unit: float) -> GridArray:
        """The sum in integers; rounded to multiples of `unit` if it is in floats."""
        ...

    def check_before_noise(self, leaf: int) -> None:
        """Raises ValueError, with the number of the leaf, for what is no such sum."""
        ...


class _FloatSum(NamedTuple):
    """A `Sum` that is an array of floats."""

    array: Any

    @property
    def is_on_grid(self) -> bool:
        return False

    def words(self) -> tuple[jax.Array, None]:
        return jnp.asarray(self.array), None

    def to_float(self) -> jax.Array:
        x = jnp.asarray(self.array)
        return x.astype(at_least_float32(x.dtype))

    def snapped(self, unit: float) -> GridArray:
        return snap(jnp.asarray(self.array), None, unit)

    def check_before_noise(self, leaf: int) -> None:
        check_float(self.array, leaf)


def is_sum(x: Any) -> bool:
    """Whether `x` is a sum that takes more than one array to write down."""
    return isinstance(x, DoubleWord | GridArray | _FloatSum)


def as_sum(leaf: Any) -> Sum:
    """A leaf of a sum of clipped gradients."""
    return leaf if is_sum(leaf) else _FloatSum(leaf)


def num_entries(sum_of_clipped_grads: PyTree) -> int:
    """How many entries a sum has, whatever it is written down in."""
    leaves = jax.tree.leaves(sum_of_clipped_grads, is_leaf=is_sum)
    shapes = (jax.eval_shape(lambda x: as_sum(x).to_float(), x).shape for x in leaves)
    return sum(map(math.prod, shapes))
