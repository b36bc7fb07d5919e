"""Sites: where a program's data meets its parameters.

At a site, the gradient of a view has a form that is known before it is computed:

    outer   G[k] = sum over positions t of  left[k, t] (x) right[k, t]
    dense   G itself

for each example. In the first, `left` comes from the values that went in, `right` from
the cotangent of what came out (Goodfellow, 2015), and nothing of the size of G need be
formed to know its norm, or the sum of many of them.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dpmp.engines.book_keeping._views import View
from dpmp.numerics._stored import at_least_float32

# The parts of left, and right.
Factors = tuple[list[jax.Array], jax.Array]


@dataclass(frozen=True)
class Outer:
    """A gradient that is a sum of outer products, in K independent groups.

    Attributes:
      factors: from the recorded values and the cotangent of one example to left, in
        one part or in several, (K, T, n_1), (K, T, n_2), ... that make up n, and to
        right, (K, T, m).
      to_view: from (K, n, m) to the shape of the view, without arithmetic.
      axes: which axes of the view make up K, n and m, in this order; None if they are
        not made up of whole axes.
      num_rows: if `left` holds the numbers of rows, (K, T), in place of vectors (K, T,
        n) that are 1 there and 0 elsewhere: n.
    """

    factors: Callable[[list[jax.Array], jax.Array], Factors]
    to_view: Callable[[jax.Array], jax.Array]
    axes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None
    num_rows: int | None = None


@dataclass(frozen=True)
class Site:
    """One meeting of data and a view.

    Attributes:
      rule: how its gradient is known, for people.
      view: what the gradient is of.
      records: the values to be recorded on the way forward, by number.
      cotangent: shape and dtype of what comes out of the way back: the cotangent of
        the output, or for dense sites the gradient.
      outer: the form of the gradient; None if it is dense.
    """

    rule: str
    view: View
    records: tuple[int, ...]
    cotangent: jax.ShapeDtypeStruct
    outer: Outer | None


def dense(site: Site) -> Site:
    """The same site, as one whose gradient is there."""
    aval = site.view.aval
    dtype = at_least_float32(aval.dtype, site.cotangent.dtype)
    cotangent = jax.ShapeDtypeStruct(aval.shape, dtype)
    return dataclasses.replace(site, records=(), cotangent=cotangent, outer=None)


def in_call(site: Site, view: View, first_record: int) -> Site:
    """A site inside of a call, as one of what is around it."""
    records = tuple(first_record + i for i in site.records)
    return dataclasses.replace(site, view=view, records=records)


def in_loop(
    site: Site, view: View, first_record: int, size: int, *, is_mapped: bool
) -> Site:
    """A site inside of a loop, as one of all iterations.

    Args:
      site: of one iteration.
      view: of all of them.
      first_record: the number of the first recorded value of the loop.
      size: the number of iterations.
      is_mapped: whether the iterations have views of their own, or share one, whose
        gradient is then the sum over them.
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
    """One group more for each iteration."""

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
    """More positions for each iteration."""

    def factors(*args: Any) -> Factors:
        both = jax.vmap(outer.factors)(*args)
        return jax.tree.map(
            lambda x: jax.lax.collapse(jnp.moveaxis(x, 0, 1), 1, 3), both
        )

    return dataclasses.replace(outer, factors=factors)
