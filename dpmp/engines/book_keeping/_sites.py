"""Sites: the places in a program where data meets a view of its parameters.

The gradient of that view, for one example, has one of two forms. The form is known
before the gradient is computed:

    outer   G[k] = sum over positions t of  left[k, t] (x) right[k, t]
    dense   G itself

In the outer form, `left` comes from a value that enters the site, which is recorded,
and `right` from the cotangent of its output (Goodfellow, 2015). The norm of G, and the
sum of many G, can be computed without an array of the size of G.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpmp.engines.book_keeping._views import View
from dpmp.numerics._stored import at_least_float32

# The parts of left, and then right.
Factors = tuple[list[jax.Array], jax.Array]


class Sizes(NamedTuple):
    """The sizes of a sum of outer products: K groups, T positions, n and m."""

    groups: int
    positions: int
    left: int
    right: int


@dataclass(frozen=True)
class Outer:
    """A gradient that is a sum of outer products, in K independent groups.

    Attributes:
      record: the shape and dtype of the recorded value.
      sizes: K, T, n and m.
      factors: a function of the recorded value and the cotangent of one example. It
        returns left and right. Left has one part or several, (K, T, n_1), (K, T, n_2),
        ..., which make up n. Right has the shape (K, T, m).
      to_view: maps (K, n, m) to the shape of the view, without arithmetic.
      axes: the axes of the view that make up K, n and m, in this order. None if K, n
        and m are not made up of whole axes.
      has_rows: whether `left` holds row numbers, (K, T). A row number stands for a
        vector of length n that is 1 at this row and 0 elsewhere.
    """

    record: jax.ShapeDtypeStruct
    sizes: Sizes
    factors: Callable[[jax.Array, jax.Array], Factors]
    to_view: Callable[[jax.Array], jax.Array]
    axes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None
    has_rows: bool = False


@dataclass(frozen=True)
class Site:
    """One place where data meets a view.

    Attributes:
      rule: the name of the rule that gives the gradient, for people.
      view: the view whose gradient is taken.
      cotangent: the shape and dtype of the cotangent of the output, which comes out of
        the backward pass. For dense sites, the gradient comes out.
      outer: the outer form of the gradient, or None if it is dense.
    """

    rule: str
    view: View
    cotangent: jax.ShapeDtypeStruct
    outer: Outer | None = None


class Recorded(NamedTuple):
    """The recorded value of a site (None if it is dense), and its cotangent."""

    value: Any
    cotangent: jax.Array


def dense(site: Site) -> Site:
    """Returns the same site in dense form, for a gradient that is formed."""
    aval = site.view.aval
    dtype = at_least_float32(aval.dtype, site.cotangent.dtype)
    cotangent = jax.ShapeDtypeStruct(aval.shape, dtype)
    return dataclasses.replace(site, cotangent=cotangent, outer=None)


def in_loop(site: Site, view: View, size: int, *, is_mapped: bool) -> Site:
    """Turns a site in the body of a loop into a site for all iterations.

    If each iteration has a view of its own (`is_mapped`), `view` has an axis for them.
    If they share one view, its gradient is the sum over the iterations.
    """
    cotangent, outer = site.cotangent, site.outer
    if outer is not None or is_mapped:
        cotangent = _stacked(cotangent, size)
    if outer is not None:
        outer = _of_groups(outer, size) if is_mapped else _of_positions(outer, size)
    return dataclasses.replace(site, view=view, cotangent=cotangent, outer=outer)


def _stacked(x: jax.ShapeDtypeStruct, size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size, *x.shape), x.dtype)


def _of_groups(outer: Outer, size: int) -> Outer:
    """Adds one group for each iteration."""

    def to_view(grad: jax.Array) -> jax.Array:
        return jax.vmap(outer.to_view)(grad.reshape(size, -1, *grad.shape[1:]))

    axes = outer.axes
    if axes is not None:
        groups, left, right = (tuple(i + 1 for i in part) for part in axes)
        axes = ((0, *groups), left, right)
    return Outer(
        _stacked(outer.record, size),
        outer.sizes._replace(groups=size * outer.sizes.groups),
        _for_iterations(outer, lambda x: jax.lax.collapse(x, 0, 2)),
        to_view,
        axes,
        outer.has_rows,
    )


def _of_positions(outer: Outer, size: int) -> Outer:
    """Adds positions for each iteration."""
    return dataclasses.replace(
        outer,
        record=_stacked(outer.record, size),
        sizes=outer.sizes._replace(positions=size * outer.sizes.positions),
        factors=_for_iterations(
            outer, lambda x: jax.lax.collapse(jnp.moveaxis(x, 0, 1), 1, 3)
        ),
    )


def _for_iterations(
    outer: Outer, join: Callable[[jax.Array], jax.Array]
) -> Callable[[jax.Array, jax.Array], Factors]:
    def factors(*args: jax.Array) -> Factors:
        return jax.tree.map(join, jax.vmap(outer.factors)(*args))

    return factors
