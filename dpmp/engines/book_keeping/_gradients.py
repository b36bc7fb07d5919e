"""Gradients of sites: their factors, and the gradients themselves where needed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpmp.engines.book_keeping import _products, _views
from dpmp.engines.book_keeping._sites import Factors, Site
from dpmp.engines.book_keeping._views import View
from dpmp.numerics._stored import at_least_float32

# The recorded values of one example by number, with None for values that nothing reads
# any more, and a cotangent for each site.
Recorded = tuple[list[Any], list[jax.Array]]


class Sizes(NamedTuple):
    """The sizes of a sum of outer products: groups, positions, and the two sides."""

    groups: int
    positions: int
    left: int
    right: int


def sizes_of(site: Site, records: list[Any]) -> Sizes:
    assert site.outer is not None
    chosen = [records[i] for i in site.records]
    left, right = jax.eval_shape(site.outer.factors, chosen, site.cotangent)
    n = site.outer.num_rows or sum(part.shape[-1] for part in left)
    groups, positions, m = right.shape
    return Sizes(groups, positions, n, m)


def factors(site: Site, number: int, recorded: Recorded) -> Factors:
    """Returns left and right of one example; vectors have floats of 16 bits or more."""
    records, cotangents = recorded
    assert site.outer is not None
    chosen = [records[i] for i in site.records]
    left, right = site.outer.factors(chosen, cotangents[number])
    if num_rows_of(site) is None:
        left = list(map(_as_floats, left))
    return left, _as_floats(right)


def _as_floats(x: jax.Array) -> jax.Array:
    """Widens integers, which wrap around, and 8-bit floats, which lose bits on GPUs."""
    is_wide = _views.is_float(x.dtype) and x.dtype.itemsize >= 2
    return x if is_wide else x.astype(jnp.float32)


def product(site: Site, number: int, recorded: Recorded) -> jax.Array:
    """Forms the gradient of a site of the outer form: (K, n, m)."""
    assert site.outer is not None
    left, right = factors(site, number, recorded)
    if (num_rows := site.outer.num_rows) is None:
        products = [
            _products.contract(part, right, ((1,), (1,)), ((0,), (0,))) for part in left
        ]
        return _products.apart(jnp.concatenate(products, axis=1))
    right = right.astype(at_least_float32(right.dtype))
    rows = jnp.zeros((right.shape[0], num_rows, right.shape[-1]), right.dtype)
    add = jax.vmap(lambda total, i, x: total.at[i].add(x, mode="promise_in_bounds"))
    return add(rows, left[0], right)


def gradient(site: Site, number: int, recorded: Recorded) -> jax.Array:
    """Returns the gradient of a site's view, for one example, in float32 or wider."""
    if site.outer is None:
        grad = recorded[1][number]
        return grad.astype(at_least_float32(grad.dtype))
    return site.outer.to_view(product(site, number, recorded))


def pull_back(
    views: Sequence[View], params: Sequence[int], roots: Any, grads: list[jax.Array]
) -> list[jax.Array]:
    """Turns gradients of views into those of parameters, in float32 or wider."""
    primals = [
        jnp.asarray(roots[i]).astype(at_least_float32(roots[i].dtype)) for i in params
    ]

    def evaluate(*values: jax.Array) -> list[jax.Array]:
        return _views.evaluate(
            views, {**roots, **dict(zip(params, values, strict=True))}
        )

    outputs, vjp = jax.vjp(evaluate, *primals)
    return list(vjp([g.astype(x.dtype) for g, x in zip(grads, outputs, strict=True)]))


def num_rows_of(site: Site) -> int | None:
    assert site.outer is not None
    return site.outer.num_rows
