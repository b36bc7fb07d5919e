"""Sums of weighted per-example gradients, from the records of their sites.

    sum over i of  c_i G_i  =  sum over i, t of  left_it (x) (c_i right_it)

The right side is one contraction over examples and positions, with a float32 result. If
both operands are bfloat16, the product of c_i and a factor is rounded to bfloat16
again.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpmp.engines.book_keeping import _gradients, _products
from dpmp.engines.book_keeping._gradients import Recorded
from dpmp.engines.book_keeping._sites import Factors, Site
from dpmp.numerics._stored import at_least_float32


def weighted_sum(
    sites: Sequence[Site],
    params: Sequence[int],
    roots: Any,
    recorded: Recorded,
    coefs: jax.Array,
    keep: jax.Array,
) -> dict[int, jax.Array]:
    """Sums coefficient times gradient over the examples, for some parameters.

    Args:
      sites: the sites of the program of one example.
      params: the parameters, as numbers of roots.
      roots: the values of parameters and constants.
      recorded: the records of all examples, with a leading axis.
      coefs: (B,), float32.
      keep: (B,) bool. An example whose entry is False contributes zero, by selection,
        whatever its records hold.

    Returns:
      The sums, float32 or wider; zeros for a parameter without a site.
    """
    numbers = [i for i, site in enumerate(sites) if site.view.leaves & set(params)]
    totals = [_of_site(sites[i], i, recorded, coefs, keep) for i in numbers]
    views = [sites[i].view for i in numbers]
    sums = _gradients.pull_back(views, params, roots, totals)
    return dict(zip(params, sums, strict=True))


def _of_site(
    site: Site, number: int, recorded: Recorded, coefs: jax.Array, keep: jax.Array
) -> jax.Array:
    """Sums the gradients of a site over the examples, in the shape of its view."""
    if site.outer is None:
        return _of_entries(recorded[1][number], coefs, keep)

    def factors(*one: Any) -> Factors:
        return _gradients.factors(site, number, one)

    left, right = jax.vmap(factors)(*recorded)
    if site.outer.num_rows is not None:
        weighted = _select(keep, _scale(right, coefs))
        return site.outer.to_view(_scatter(left[0], weighted, site.outer.num_rows))

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
    dtype = _weighted_dtype(first, second)
    first = _select(keep, _scale(first, coefs)).astype(dtype)
    return _contract(first, _select(keep, second))


@jax.jit
def _scale(x: jax.Array, coefs: jax.Array) -> jax.Array:
    x = x.astype(at_least_float32(x.dtype))
    return coefs.astype(x.dtype).reshape(-1, *[1] * (x.ndim - 1)) * x


def _of_entries(grads: jax.Array, coefs: jax.Array, keep: jax.Array) -> jax.Array:
    terms = _select(keep, _scale(grads, coefs))
    while len(terms) > 1:
        half = len(terms) // 2
        rest = terms[2 * half :]
        terms = jnp.concatenate([terms[:half] + terms[half : 2 * half], rest])
    return terms[0]


@jax.jit
def _select(keep: jax.Array, x: jax.Array) -> jax.Array:
    """Selects zero where `keep` is False; a product with zero could be NaN."""
    return jnp.where(keep.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x))


def _weighted_dtype(first: jax.Array, second: jax.Array) -> Any:
    """The dtype of a weighted factor; float16 cannot hold every coefficient."""
    if first.dtype == second.dtype == jnp.bfloat16:
        return first.dtype
    return at_least_float32(first.dtype, second.dtype)


def _contract(left: jax.Array, right: jax.Array) -> jax.Array:
    """Contracts (B, K, T, n) with (B, K, T, m) to (K, n, m)."""
    if left.dtype != right.dtype:
        dtype = at_least_float32(left.dtype, right.dtype)
        left, right = left.astype(dtype), right.astype(dtype)
    if left.shape[1] == 1:
        # Two axes after a reshape would be slower: XLA would fold a transposition into
        # the product, and its CPU compiler would widen both bfloat16 operands for it.
        return _products.contract(left[:, 0], right[:, 0], ((0, 1), (0, 1)))[None]
    return _products.contract(left, right, ((0, 2), (0, 2)), ((1,), (1,)))


def _scatter(rows: jax.Array, values: jax.Array, num_rows: int) -> jax.Array:
    """Adds values (B, K, T, m) to the rows (B, K, T) of zeros (K, num_rows, m)."""

    def add(rows: jax.Array, values: jax.Array) -> jax.Array:
        zeros = jnp.zeros((num_rows, values.shape[-1]), values.dtype)
        values = values.reshape(-1, values.shape[-1])
        return zeros.at[rows.ravel()].add(values, mode="promise_in_bounds")

    return jax.vmap(add, in_axes=(1, 1))(rows, values)
