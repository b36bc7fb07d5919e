"""Writes products with ragged groups (`jax.lax.ragged_dot`) as ordinary products.

jax cannot map such a product over examples: it has no rule for `jax.vmap`. The ordinary
product multiplies each row by the matrices of all groups, and keeps the result of the
row's own group. So it takes as many times longer as there are groups.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.programs._bodies import sub_programs
from dpmp.programs._interpreter import bind
from dpmp.programs._transformations import rewrite

_NAME = "ragged_dot_general"


def without_ragged_products(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns `fun` with ordinary products in place of ragged ones."""
    return rewrite(fun, _replace)


def has_ragged_products(jaxpr: Any) -> bool:
    """Whether a program, or one inside of it, has such a product."""
    return any(map(_is_ragged, jaxpr.eqns))


def _is_ragged(eqn: Any) -> bool:
    inside = (part.jaxpr for part in sub_programs(eqn))
    return eqn.primitive.name == _NAME or any(map(has_ragged_products, inside))


def _replace(eqn: Any, values: list[Any]) -> list[Any] | None:
    if eqn.primitive.name == _NAME:
        return [_product(eqn, *values)]
    return None if _is_ragged(eqn) else bind(eqn, values)


def _product(eqn: Any, left: Any, right: Any, group_sizes: Any) -> jax.Array:
    """Evaluates the equation of a ragged product; rows of no group become zero."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracting, batch) = numbers.dot_dimension_numbers
    (row_axis,) = numbers.lhs_ragged_dimensions
    _validate.require(
        row_axis not in (*contracting[0], *batch[0]),
        "groups of a ragged product must be groups of rows",
        lhs_ragged_dimensions=tuple(numbers.lhs_ragged_dimensions),
        fix="Use jax.lax.ragged_dot, or one-hot groups and jnp.einsum.",
    )
    (group_axis,) = numbers.rhs_group_dimensions
    free_left = [i for i in range(left.ndim) if i not in (*contracting[0], *batch[0])]
    free_right = [i for i in range(right.ndim) if i not in (*contracting[1], *batch[1])]
    everything = jax.lax.dot_general(
        left,
        right,
        numbers.dot_dimension_numbers,
        precision=eqn.params["precision"],
        preferred_element_type=eqn.params["preferred_element_type"],
    )
    rows = len(batch[0]) + free_left.index(row_axis)
    groups = len(batch[0]) + len(free_left) + free_right.index(group_axis)
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(left.shape[row_axis])[:, None]
    is_own = (ends - group_sizes <= row) & (row < ends)  # (rows, groups)
    shape = [1] * everything.ndim
    shape[rows], shape[groups] = is_own.shape
    return jnp.sum(everything, axis=groups, where=is_own.reshape(shape))
