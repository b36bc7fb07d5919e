"""Norms of per-example gradients, from the records of their sites.

The gradient of a parameter is the sum over its sites. Its squared norm is found in one
of three ways:

1. If the sites read different entries of the parameter, their squared norms add up.
2. If they read the same entries, inner products of positions give it (ghost norms:
   Goodfellow, 2015; Li et al., 2021). This way is taken where it costs less than
   forming G:

    <G_a, G_b> = sum over positions t, s of <left_at, left_bs> <right_at, right_bs>

3. Otherwise the gradient is formed, one example at a time if need be. If a parameter
   has several sites, or if the loss computes with it before it meets data, the
   gradients of the sites are then sent back to the parameter.

Each squared norm comes with a squared extent. The extent is the sum of |left| |right|
over positions, and rounding errors are relative to it (`numerics/_bounded.py`).
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpmp.engines.book_keeping import _gradients, _products, _totals
from dpmp.engines.book_keeping._gradients import Recorded
from dpmp.engines.book_keeping._sites import Site
from dpmp.engines.book_keeping._views import View
from dpmp.numerics._bounded import FLOOR, Roundings
from dpmp.numerics._stored import at_least_float32

# Examples are measured in chunks whose temporary arrays have about this many entries.
_CHUNK_ENTRIES = 2**23

# The cost of writing an entry and reading it again, in multiplications.
COST_OF_AN_ENTRY = 16


class Measured(NamedTuple):
    """The measured gradient of one parameter, or of some of its entries, in parts.

    Attributes:
      squared_norm: the summands of the squared norm: (P,) for one example, (B, P) for a
        batch.
      extent: the summands of the squared extent (`numerics/_bounded.py`), in the same
        layout, with a P of its own. It may be too large by the allowance for underflow.
    """

    squared_norm: jax.Array
    extent: jax.Array


@dataclass(frozen=True)
class Term:
    """A part of the squared norms that is computed at once.

    Attributes:
      form: how the squared norm is computed. "entries": the gradient was recorded
        itself. "kept": the gradient is formed, and kept for the sum. "gram": by inner
        products of positions. "product": the gradient is formed for the norm and not
        stored. "parameters": the gradient is formed and sent back to the parameters.
      sites: the numbers of the sites.
      params: the parameters whose squared norms the term is a part of.
      measure: a function of the values of all roots and the records of one example. It
        returns a `Measured` for each of `params`.
      roundings: the counts of roundings in these numbers, and in the sum of gradients
        over a batch.
      num_products: the number of products that the squared norm is a sum of.
      cost: multiplications for one example.
      size: float32 entries of temporary memory for one example.
    """

    form: str
    sites: list[int]
    params: list[int]
    measure: Callable[[Any, Recorded], list[Measured]]
    roundings: Roundings
    num_products: int
    cost: float
    size: float

    @property
    def cancels(self) -> bool:
        """Whether the gradient is not in memory when it is summed over examples."""
        return self.form not in ("entries", "kept")


def entry_term(site: Site, number: int, param: int) -> Term:
    """Makes the term of a site whose gradient is recorded itself."""

    def measure(roots: Any, recorded: Recorded) -> list[Measured]:
        del roots
        squares = _totals.of_rows(_square(recorded[1][number]))
        return [Measured(squares, squares)]

    size = math.prod(site.cotangent.shape)
    roundings = _totals.num_roundings(size) + 1
    return Term(
        "entries",
        [number],
        [param],
        measure,
        Roundings(total=roundings, extent=roundings),
        size,
        size,
        0,
    )


def product_term(site: Site, number: int, param: int, records: Any) -> Term:
    """Makes the term of a site of the outer form, whose gradient is formed."""
    groups, positions, left, right = _gradients.sizes_of(site, records)
    size = groups * left * right

    def measure(roots: Any, recorded: Recorded) -> list[Measured]:
        del roots
        squares = _square(_gradients.product(site, number, recorded))
        extents = _extents(site, number, recorded)
        return [Measured(_totals.of_rows(squares), jnp.square(extents))]

    roundings = Roundings(
        product=positions + 1,
        total=_totals.num_roundings(size) + 1,
        extent=_roundings_of_extent(groups, positions, left, right),
        positions=positions,
    )
    if _gradients.num_rows_of(site) is not None:
        cost = size * COST_OF_AN_ENTRY + groups * positions * right
    else:
        cost = size * (positions * _cost_of_products(site) + COST_OF_AN_ENTRY)
    return Term("product", [number], [param], measure, roundings, size, cost, size)


def gram_term(
    sites: Sequence[Site], swapped: dict[int, bool], param: int, records: Any
) -> Term:
    """Makes the term of sites that have the entries of one parameter in common.

    Args:
      sites: all sites.
      swapped: for the number of each site in the term, whether its left side is the
        right side of the first site.
      param: the number of the parameter.
      records: shapes and dtypes of the recorded values.
    """

    def measure(roots: Any, recorded: Recorded) -> list[Measured]:
        del roots
        sides = {}
        for i, is_swapped in swapped.items():
            left, right = _gradients.factors(sites[i], i, recorded)
            pair = _Side(left, _gradients.num_rows_of(sites[i])), _Side([right], None)
            sides[i] = pair[::-1] if is_swapped else pair
        squares, extents = [], 0.0
        for a, b in itertools.combinations_with_replacement(sides, 2):
            grams = [_gram(x, y) for x, y in zip(sides[a], sides[b], strict=True)]
            squares.append((1 if a == b else 2) * _totals.of_rows(_times(*grams)))
            if a == b:
                sizes = map(_sizes_of_vectors, sides[a], grams)
                extents += jnp.sum(_times(*sizes), axis=1)
        return [Measured(_totals.joined(squares), jnp.square(extents))]

    sizes = [_gradients.sizes_of(sites[i], records) for i in swapped]
    groups, _, left, right = sizes[0]
    positions = sum(x.positions for x in sizes)
    squares = groups * positions**2
    longest = max(x.positions for x in sizes)
    # Row numbers are compared, which costs no multiplication and rounds nothing.
    multiplied = (
        right
        if all(_gradients.num_rows_of(sites[i]) for i in swapped)
        else left + right
    )
    roundings = Roundings(
        inner=multiplied + _totals.num_roundings(groups * longest**2) + len(sizes) ** 2,
        extent=_roundings_of_extent(groups, positions, multiplied, 0),
        positions=positions,
    )
    rows = sum(
        x.positions
        for i, x in zip(swapped, sizes, strict=True)
        if _gradients.num_rows_of(sites[i]) is not None
    )
    cost = squares * (right + COST_OF_AN_ENTRY)
    cost += groups * (positions - rows) ** 2 * left
    return Term(
        "gram", list(swapped), [param], measure, roundings, squares, cost, 2 * squares
    )


def parameter_term(
    sites: Sequence[Site], numbers: list[int], params: Sequence[View], records: Any
) -> Term:
    """Makes the term of any sites: it forms their gradients and sends them back.

    The extents hold only if all sites belong to one parameter, and each of their views
    consists of entries of it.
    """
    views = [sites[i].view for i in numbers]
    roots_of_params = [param.root for param in params if param.root is not None]

    def measure(roots: Any, recorded: Recorded) -> list[Measured]:
        grads = [_gradients.gradient(sites[i], i, recorded) for i in numbers]
        of_params = _gradients.pull_back(views, roots_of_params, roots, grads)
        extent = jnp.zeros((), at_least_float32(*(grad.dtype for grad in grads)))
        for i, grad in zip(numbers, grads, strict=True):
            if sites[i].outer is None:
                parts = _totals.of_rows(_square(grad))
            else:
                parts = jnp.square(_extents(sites[i], i, recorded))
            extent += jnp.sqrt(_totals.add_up(parts)).astype(extent.dtype)
        return [
            Measured(_totals.of_rows(_square(x)), jnp.square(extent)[None])
            for x in of_params
        ]

    size = sum(math.prod(param.aval.shape) for param in params)
    roundings = Roundings(total=_totals.num_roundings(size) + 1)
    positions, cost, temporary = 0, float(size), size
    for i in numbers:
        num_entries = math.prod(sites[i].view.aval.shape)
        temporary += num_entries
        if sites[i].outer is None:
            positions += 1
            extent = _totals.num_roundings(num_entries) + len(numbers)
            cost += num_entries
        else:
            outer = _gradients.sizes_of(sites[i], records)
            positions += outer.positions
            extent = _roundings_of_extent(*outer) + len(numbers)
            per_entry = outer.positions * _cost_of_products(sites[i])
            cost += num_entries * (per_entry + COST_OF_AN_ENTRY)
        roundings = roundings.at_least(Roundings(extent=2 * extent))
    # An entry of one site may be added to an entry of any other site.
    several = Roundings(product=positions + len(numbers), positions=positions)
    return Term(
        "parameters",
        numbers,
        roots_of_params,
        measure,
        roundings.at_least(several),
        size,
        cost,
        temporary,
    )


def _cost_of_products(site: Site) -> float:
    """The cost factor of forming a gradient: bfloat16 factors are transposed for it."""
    return 2 if site.cotangent.dtype == jnp.bfloat16 else 1


def measure_all(terms: Sequence[Term], roots: Any, recorded: Recorded) -> Any:
    """Evaluates the terms for all examples.

    Args:
      terms: the terms of all sites.
      roots: the values of parameters and constants.
      recorded: the records of all examples, with a leading axis.

    Returns:
      For each term a list with one `Measured`, (B, P), for each of its parameters.
    """
    results = []
    for term in terms:
        one = functools.partial(term.measure, roots)
        num_examples = jax.tree.leaves(recorded)[0].shape[0]
        chunk = max(1, int(_CHUNK_ENTRIES / max(term.size, 1)))
        if chunk >= num_examples:
            results.append(jax.vmap(one)(recorded))
        else:
            results.append(jax.lax.map(one, recorded, batch_size=chunk))
    return results


def _square(x: jax.Array) -> jax.Array:
    return jnp.square(x.astype(at_least_float32(x.dtype)))


class _Side(NamedTuple):
    """A side of outer products: vectors (K, T, n) in parts, or row numbers (K, T)."""

    parts: list[jax.Array]
    num_rows: int | None


def _gram(a: _Side, b: _Side) -> jax.Array:
    """The inner products of all pairs of positions: (K, T_a, T_b)."""
    if a.num_rows is not None and b.num_rows is not None:
        rows, others = a.parts[0], b.parts[0]
        return (rows[:, :, None] == others[:, None, :]).astype(jnp.float32)
    if b.num_rows is not None:
        return jnp.swapaxes(_gram(b, a), 1, 2)
    if a.num_rows is not None:
        (rows,), (vectors,) = a.parts, b.parts
        rows = jnp.take_along_axis(vectors, rows[:, None, :], axis=2)
        return jnp.swapaxes(rows, 1, 2).astype(at_least_float32(rows.dtype))
    grams = (
        _products.contract(x, y, ((2,), (2,)), ((0,), (0,)))
        for x, y in zip(a.parts, b.parts, strict=True)
    )
    return functools.reduce(jnp.add, grams)


def _sizes_of_vectors(side: _Side, gram: jax.Array) -> jax.Array:
    """The norms of vectors, from their inner products: (K, T)."""
    return _root(jnp.diagonal(gram, axis1=1, axis2=2), side)


def _root(squares: Any, side: _Side) -> jax.Array:
    """A root, a little too large, to cover squares that were flushed to zero."""
    if side.num_rows is not None:
        return jnp.ones(side.parts[0].shape, jnp.float32)
    num_entries = sum(part.shape[2] for part in side.parts)
    return _root_of(squares, FLOOR * num_entries)


@jax.jit  # a program has one copy for all arrays of one shape
def _root_of(squares: jax.Array, floor: float) -> jax.Array:
    return jnp.sqrt(jnp.maximum(squares, 0) + floor)


def _extents(site: Site, number: int, recorded: Recorded) -> jax.Array:
    """The extent, the sum of |left| |right| over positions: (K,)."""
    left, right = _gradients.factors(site, number, recorded)
    sides = _Side(left, _gradients.num_rows_of(site)), _Side([right], None)
    sizes = (
        _root(sum(jnp.sum(_square(x), axis=-1) for x in side.parts), side)
        for side in sides
    )
    return jnp.sum(_times(*sizes), axis=1)


@jax.jit
def _times(a: jax.Array, b: jax.Array) -> jax.Array:
    dtype = at_least_float32(a.dtype, b.dtype)
    return a.astype(dtype) * b.astype(dtype)


def _roundings_of_extent(groups: int, positions: int, left: int, right: int) -> int:
    return left + right + 2 * positions + groups
