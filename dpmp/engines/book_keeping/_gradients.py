"""Gradients of sites, and their weighted sums over a batch.

The sum of outer products is one contraction over examples and positions, with a float32
result:

    sum over i of  c_i G_i  =  sum over i, t of  left_it (x) (c_i right_it)

If both factors are bfloat16, the product of c_i and a factor is rounded to bfloat16
again.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpmp.engines.book_keeping import _products, _totals, _views
from dpmp.engines.book_keeping._sites import Factors, Recorded, Site
from dpmp.engines.book_keeping._views import View
from dpmp.numerics._stored import at_least_float32


def factors(site: Site, recorded: Recorded) -> Factors:
    """Returns left and right of one example; vectors have floats of 16 bits or more."""
    assert site.outer is not None
    left, right = site.outer.factors(*recorded)
    if not site.outer.has_rows:
        left = list(map(_as_floats, left))
    return left, _as_floats(right)


def _as_floats(x: jax.Array) -> jax.Array:
    """Widens integers, which wrap around, and 8-bit floats, which lose bits on GPUs."""
    is_wide = _views.is_float(x.dtype) and x.dtype.itemsize >= 2
    return x if is_wide else x.astype(jnp.float32)


def product(site: Site, recorded: Recorded) -> jax.Array:
    """Forms the gradient of a site of the outer form: (K, n, m)."""
    assert site.outer is not None
    left, right = factors(site, recorded)
    if not site.outer.has_rows:
        products = [
            _products.contract(part, right, ((1,), (1,)), ((0,), (0,))) for part in left
        ]
        return _products.apart(jnp.concatenate(products, axis=1))
    groups, _, num_rows, width = site.outer.sizes
    right = _views.widen(right)
    add = jax.vmap(lambda total, i, x: total.at[i].add(x, mode="promise_in_bounds"))
    return add(jnp.zeros((groups, num_rows, width), right.dtype), left[0], right)


def gradient(site: Site, recorded: Recorded) -> jax.Array:
    """Returns the gradient of a site's view, for one example, in float32 or wider."""
    if site.outer is None:
        return _views.widen(recorded.cotangent)
    return site.outer.to_view(product(site, recorded))


def pull_back(
    views: Sequence[View],
    params: Sequence[int],
    roots: Mapping[int, Any],
    grads: list[jax.Array],
) -> list[jax.Array]:
    """Turns gradients of views into those of parameters, in float32 or wider."""

    def evaluate(*values: jax.Array) -> list[jax.Array]:
        return _views.evaluate(
            views, {**roots, **dict(zip(params, values, strict=True))}
        )

    outputs, vjp = jax.vjp(evaluate, *(_views.widen(roots[i]) for i in params))
    return list(vjp([g.astype(x.dtype) for g, x in zip(grads, outputs, strict=True)]))


def weighted_sum(
    sites: Sequence[Site],
    params: Sequence[int],
    roots: Mapping[int, Any],
    recorded: Sequence[Recorded],
    coefs: jax.Array,
    keep: jax.Array,
) -> dict[int, jax.Array]:
    """Sums coefficient times gradient over the examples, for some parameters.

    An example that is not to be kept contributes zero, by selection, whatever is
    recorded for it. A parameter without a site has zeros.
    """
    used = [
        (site, numbers)
        for site, numbers in zip(sites, recorded, strict=True)
        if not site.view.leaves.isdisjoint(params)
    ]
    totals = [_sum_of_site(site, numbers, coefs, keep) for site, numbers in used]
    sums = pull_back([site.view for site, _ in used], params, roots, totals)
    return dict(zip(params, sums, strict=True))


def _sum_of_site(
    site: Site, recorded: Recorded, coefs: jax.Array, keep: jax.Array
) -> jax.Array:
    """Sums the gradients of a site over the examples, in the shape of its view."""
    if site.outer is None:
        terms = _select(keep, _scale(recorded.cotangent, coefs))
        return _totals.add_up(terms, axis=0)
    left, right = jax.vmap(functools.partial(factors, site))(recorded)
    if site.outer.has_rows:
        weighted = _select(keep, _scale(right, coefs))
        return site.outer.to_view(_scatter(left[0], weighted, site.outer.sizes.left))

    # The smaller factor is weighted, since the weighted one has to be written again.
    if len(left) == 1 and left[0].size <= right.size:
        total = _products.apart(_weighted_product(left[0], right, coefs, keep))
    else:
        totals = [_weighted_product(right, part, coefs, keep) for part in left]
        total = _products.apart(jnp.concatenate(totals, axis=2))
        total = jnp.swapaxes(total, 1, 2)
    return site.outer.to_view(total)


@jax.jit  # a program has one copy for all arrays of one shape
def _weighted_product(
    first: jax.Array, second: jax.Array, coefs: jax.Array, keep: jax.Array
) -> jax.Array:
    """Contracts (B, K, T, n) with (B, K, T, m) to (K, n, m); the first is weighted."""
    dtype = first.dtype
    if not first.dtype == second.dtype == jnp.bfloat16:
        # Float16 cannot hold every coefficient.
        dtype = at_least_float32(first.dtype, second.dtype)
    left = _select(keep, _scale(first, coefs)).astype(dtype)
    right = _select(keep, second)
    if left.dtype != right.dtype:
        dtype = at_least_float32(left.dtype, right.dtype)
        left, right = left.astype(dtype), right.astype(dtype)
    if left.shape[1] == 1:
        # Two axes after a reshape would be slower: XLA would fold a transposition into
        # the product, and its CPU compiler would widen both bfloat16 operands for it.
        return _products.contract(left[:, 0], right[:, 0], ((0, 1), (0, 1)))[None]
    return _products.contract(left, right, ((0, 2), (0, 2)), ((1,), (1,)))


@jax.jit
def _scale(x: jax.Array, coefs: jax.Array) -> jax.Array:
    x = x.astype(at_least_float32(x.dtype))
    return coefs.astype(x.dtype).reshape(-1, *[1] * (x.ndim - 1)) * x


@jax.jit
def _select(keep: jax.Array, x: jax.Array) -> jax.Array:
    """Selects zero where `keep` is False; a product with zero could be NaN."""
    return jnp.where(keep.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x))


def _scatter(rows: jax.Array, values: jax.Array, num_rows: int) -> jax.Array:
    """Adds values (B, K, T, m) to the rows (B, K, T) of zeros (K, num_rows, m)."""

    def add(rows: jax.Array, values: jax.Array) -> jax.Array:
        zeros = jnp.zeros((num_rows, values.shape[-1]), values.dtype)
        values = values.reshape(-1, values.shape[-1])
        return zeros.at[rows.ravel()].add(values, mode="promise_in_bounds")

    return jax.vmap(add, in_axes=(1, 1))(rows, values)
