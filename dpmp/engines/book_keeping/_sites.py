"""Sites: the places in a program where data meets a view of its parameters.

The gradient of that view, for one example, has one of two forms. The form is known
before the gradient is computed:

    outer   G[k] = sum over positions t of  left[k, t] (x) right[k, t]
    dense   G itself

In the outer form, `left` comes from the values that enter the site, and `right` from
the cotangent of its output (Goodfellow, 2015). The norm of G, and the sum of many G,
can be computed without an array of the size of G.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dpmp.engines.book_keeping._views import View
from dpmp.numerics._stored import at_least_float32

# The parts of left, and then right.
Factors = tuple[list[jax.Array], jax.Array]


@dataclass(frozen=True)
class Outer:
    """A gradient that is a sum of outer products, in K independent groups.

    Attributes:
      factors: a function of the recorded values and the cotangent of one example. It
        returns left and right. Left has one part or several, (K, T, n_1), (K, T, n_2),
        ..., which make up n. Right has the shape (K, T, m).
      to_view: maps (K, n, m) to the shape of the view, without arithmetic.
      axes: the axes of the view that make up K, n and m, in this order. None if K, n
        and m are not made up of whole axes.
      num_rows: n, if `left` holds row numbers, (K, T). A row number stands for a vector
        of length n that is 1 at this row and 0 elsewhere. None otherwise.
    """

    factors: Callable[[list[jax.Array], jax.Array], Factors]
    to_view: Callable[[jax.Array], jax.Array]
    axes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None
    num_rows: int | None = None


@dataclass(frozen=True)
class Site:
    """One place where data meets a view.

    Attributes:
      rule: the name of the rule that gives the gradient, for people.
      view: the view whose gradient is taken.
      records: the numbers of the values to record in the forward pass.
      cotangent: the shape and dtype of the result of the backward pass. This is the
        cotangent of the output, or for dense sites the gradient.
      outer: the outer form of the gradient, or None if it is dense.
    """

    rule: str
    view: View
    records: tuple[int, ...]
    cotangent: jax.ShapeDtypeStruct
    outer: Outer | None


def dense(site: Site) -> Site:
    """Returns the same site in dense form, for a gradient that is formed."""
    aval = site.view.aval
    dtype = at_least_float32(aval.dtype, site.cotangent.dtype)
    cotangent = jax.ShapeDtypeStruct(aval.shape, dtype)
    return dataclasses.replace(site, records=(), cotangent=cotangent, outer=None)


def in_call(site: Site, view: View, first_record: int) -> Site:
    """Turns a site in the body of a call into a site of the surrounding program."""
    records = tuple(first_record + i for i in site.records)
    return dataclasses.replace(site, view=view, records=records)


def in_loop(
    site: Site, view: View, first_record: int, size: int, *, is_mapped: bool
) -> Site:
    """Turns a site in the body of a loop into a site for all iterations.

    Args:
      site: the site of one iteration.
      view: the view for all iterations.
      first_record: the number of the first recorded value of the loop.
      size: the number of iterations.
      is_mapped: whether each iteration has a view of its own. If they share one view,
        its gradient is the sum over the iterations.
    """
    cotangent, outer = site.cotangent, site.outer
    if outer is not None or is_mapped:
        shape = (size, *cotangent.shape)
        cotangent = jax.ShapeDtypeStruct(shape, cotangent.dtype)
    if outer is not None:
        outer = _of_groups(outer, size) if is_mapped else _of_positions(outer)
    site = dataclasses.replace(site, cotangent=cotangent, outer=outer)
    return in_call(site, view, first_record)


def _of_groups(outer: Outer, size: int) -> Outer:
    """Adds one group for each iteration."""

    def factors(*args: Any) -> Factors:
        both = jax.vmap(outer.factors)(*args)
        return jax.tree.map(lambda x: jax.lax.collapse(x, 0, 2), both)

    def to_view(grad: jax.Array) -> jax.Array:
        return jax.vmap(outer.to_view)(grad.reshape(size, -1, *grad.shape[1:]))

    axes = outer.axes
    if axes is not None:
        groups, *others = (tuple(i + 1 for i in part) for part in axes)
        axes = ((0, *groups), *others)
    return dataclasses.replace(outer, factors=factors, to_view=to_view, axes=axes)


def _of_positions(outer: Outer) -> Outer:
    """Adds positions for each iteration."""

    def factors(*args: Any) -> Factors:
        both = jax.vmap(outer.factors)(*args)
        return jax.tree.map(
            lambda x: jax.lax.collapse(jnp.moveaxis(x, 0, 1), 1, 3), both
        )

    return dataclasses.replace(outer, factors=factors)
