"""Norms of per-example gradients, from the numbers recorded at their sites.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpmp._typing import PyTree
from dpmp.engines.book_keeping import _linalg, _uses, _views
from dpmp.engines.book_keeping._uses import Outer, Recorded, Site, Sizes
from dpmp.numerics._bounded import FLOOR, Roundings
from dpmp.numerics._stored import at_least_float32

# Examples are measured in chunks whose temporary arrays have about this many entries.
_CHUNK_ENTRIES = 2**23

# The cost of writing an entry and reading it again, in multiplications.
COST_OF_AN_ENTRY = 16


class Measured(NamedTuple):
    """The measured gradient of one parameter, or of some of its entries, in parts.

    Both attributes are summands: (P,) for one example, (B, P) for a batch, each with a
    P of its own. `extent` is squared (`numerics/_bounded.py`). It may be too large by
    the allowance for underflow.
    """

    squared_norm: jax.Array
    extent: jax.Array


@dataclass(frozen=True)
class Term:
    """A part of the squared norms that is computed at once.

    Attributes:
      form: how the squared norm is computed; `_summary.Row` explains the words.
      sites: the numbers of the sites.
      params: the parameters whose squared norms the term is a part of.
      measure: a function of the values of all roots, and of what one example recorded
        at the sites. It returns a `Measured` for each of `params`.
      roundings: the counts of roundings in these numbers, and in the sum of gradients
        over a batch.
      num_products: the number of products that the squared norm is a sum of.
      cost: multiplications for one example.
      size: float32 entries of temporary memory for one example.
    """

    form: str
    sites: list[int]
    params: list[int]
    measure: Callable[[Mapping[int, Any], Sequence[Recorded]], list[Measured]]
    roundings: Roundings
    num_products: int
    cost: float
    size: float

    @property
    def cancels(self) -> bool:
        """Whether the gradient is not in memory when it is summed over examples."""
        return self.form not in ("entries", "kept")


def entry_term(number: int, site: Site, param: int) -> Term:
    """Makes the term of a site whose gradient is recorded itself."""
    size = math.prod(site.cotangent.shape)
    roundings = _linalg.num_roundings(size) + 1

    def measure(_: Any, recorded: Sequence[Recorded]) -> list[Measured]:
        squares = _linalg.row_sums(_square(recorded[0].cotangent))
        return [Measured(squares, squares)]

    return Term(
        "entries",
        [number],
        [param],
        measure,
        Roundings(total=roundings, extent=roundings),
        size,
        # A gradient without a rule is formed by the backward pass.
        size * (1 + COST_OF_AN_ENTRY if site.rule == "whole" else 1),
        0,
    )


def product_term(number: int, site: Site, param: int) -> Term:
    """Makes the term of a site of the outer form, whose gradient is formed."""
    outer = _outer(site)
    groups, positions, left, right = outer.sizes
    size = groups * left * right

    def measure(_: Any, recorded: Sequence[Recorded]) -> list[Measured]:
        squares = _square(_uses.product(site, recorded[0]))
        extents = _extents(site, recorded[0])
        return [Measured(_linalg.row_sums(squares), jnp.square(extents))]

    roundings = Roundings(
        product=positions + 1,
        total=_linalg.num_roundings(size) + 1,
        extent=_roundings_of_extent(outer.sizes),
        positions=positions,
    )
    products = size * positions * _cost_of_products(site)
    products = groups * positions * right if outer.has_rows else products
    cost = size * COST_OF_AN_ENTRY + products
    return Term("product", [number], [param], measure, roundings, size, cost, size)


def gram_term(sites: Mapping[int, Site], swapped: Sequence[bool], param: int) -> Term:
    """Makes the term of sites that have the entries of one parameter in common.

    `swapped` tells of each site whether its left side is the right side of the first.
    """

    def measure(_: Any, recorded: Sequence[Recorded]) -> list[Measured]:
        sides = list(map(_sides, sites.values(), recorded, swapped))
        squares, extents = [], 0.0
        for a, b in itertools.combinations_with_replacement(sides, 2):
            grams = [_gram(x, y) for x, y in zip(a, b, strict=True)]
            squares.append((1 if a is b else 2) * _linalg.row_sums(_times(*grams)))
            if a is b:
                squares_of_vectors = (jnp.diagonal(x, axis1=1, axis2=2) for x in grams)
                sizes = map(_root, squares_of_vectors, a)
                extents += jnp.sum(_times(*sizes), axis=1)
        return [Measured(_linalg.joined(squares), jnp.square(extents))]

    outers = [_outer(site) for site in sites.values()]
    groups, _, left, right = outers[0].sizes
    positions = sum(x.sizes.positions for x in outers)
    longest = max(x.sizes.positions for x in outers)
    # Row numbers are compared, which costs no multiplication and rounds nothing.
    of_rows = sum(x.sizes.positions for x in outers if x.has_rows)
    multiplied = right if all(x.has_rows for x in outers) else left + right
    roundings = Roundings(
        inner=multiplied + _linalg.num_roundings(groups * longest**2) + len(sites) ** 2,
        extent=_roundings_of_extent(Sizes(groups, positions, multiplied, 0)),
        positions=positions,
    )
    squares = groups * positions**2
    cost = squares * (right + COST_OF_AN_ENTRY)
    cost += groups * (positions - of_rows) ** 2 * left
    return Term(
        "gram", list(sites), [param], measure, roundings, squares, cost, 2 * squares
    )


def parameter_term(
    sites: Mapping[int, Site], shapes: Mapping[int, tuple[int, ...]]
) -> Term:
    """Makes the term of any sites: it forms their gradients and sends them back.

    `shapes` are those of the parameters, by their numbers. The extents hold only if all
    sites belong to one parameter, and each of their views consists of entries of it.
    """
    views, params = [site.view for site in sites.values()], list(shapes)

    def measure(roots: Mapping[int, Any], recorded: Sequence[Recorded]) -> Any:
        grads = list(map(_uses.gradient, sites.values(), recorded))
        of_params = _uses.pull_back(views, params, roots, grads)
        extent = jnp.zeros((), at_least_float32(*(grad.dtype for grad in grads)))
        for site, numbers, grad in zip(sites.values(), recorded, grads, strict=True):
            if site.outer is None:
                parts = _linalg.row_sums(_square(grad))
            else:
                parts = jnp.square(_extents(site, numbers))
            extent += jnp.sqrt(_linalg.add_up(parts)).astype(extent.dtype)
        return [
            Measured(_linalg.row_sums(_square(x)), jnp.square(extent)[None])
            for x in of_params
        ]

    size = sum(map(math.prod, shapes.values()))
    positions, roundings, cost, temporary = 0, 0, float(size), size
    for site in sites.values():
        num_entries = math.prod(site.view.aval.shape)
        temporary += num_entries
        if site.outer is None:
            positions += 1
            roundings = max(roundings, _linalg.num_roundings(num_entries))
            cost += num_entries
        else:
            positions += site.outer.sizes.positions
            roundings = max(roundings, _roundings_of_extent(site.outer.sizes))
            per_entry = site.outer.sizes.positions * _cost_of_products(site)
            cost += num_entries * (per_entry + COST_OF_AN_ENTRY)
    return Term(
        "parameters",
        list(sites),
        params,
        measure,
        Roundings(
            # An entry of one site may be added to an entry of any other site.
            product=positions + len(sites),
            total=_linalg.num_roundings(size) + 1,
            extent=2 * (roundings + len(sites)),
            positions=max(positions, 1),
        ),
        size,
        cost,
        temporary,
    )


def _outer(site: Site) -> Outer:
    assert site.outer is not None
    return site.outer


def _cost_of_products(site: Site) -> float:
    """The cost factor of forming a gradient: bfloat16 factors are transposed for it."""
    return 2 if site.cotangent.dtype == jnp.bfloat16 else 1


def measure(
    term: Term, roots: Mapping[int, Any], recorded: Sequence[Recorded]
) -> list[Measured]:
    """Evaluates a term for all examples: a `Measured`, (B, P), for each parameter."""
    of_sites = [recorded[i] for i in term.sites]
    chunk = max(1, int(_CHUNK_ENTRIES / max(term.size, 1)))
    return in_chunks(functools.partial(term.measure, roots), of_sites, chunk)


def in_chunks(fn: Callable[[Any], Any], examples: PyTree, chunk: int) -> PyTree:
    """Maps a function over examples, at most `chunk` of them at a time."""
    if chunk >= len(jax.tree.leaves(examples)[0]):
        return jax.vmap(fn)(examples)
    return jax.lax.map(fn, examples, batch_size=chunk)


def _square(x: jax.Array) -> jax.Array:
    return jnp.square(_views.widen(x))


class _Side(NamedTuple):
    """A side of outer products: vectors (K, T, n) in parts, or row numbers (K, T)."""

    parts: list[jax.Array]
    has_rows: bool


def _sides(
    site: Site, recorded: Recorded, is_swapped: bool = False
) -> tuple[_Side, _Side]:
    left, right = _uses.factors(site, recorded)
    first, second = _Side(left, _outer(site).has_rows), _Side([right], False)
    return (second, first) if is_swapped else (first, second)


def _gram(a: _Side, b: _Side) -> jax.Array:
    """The inner products of all pairs of positions: (K, T_a, T_b)."""
    if a.has_rows and b.has_rows:
        rows, others = a.parts[0], b.parts[0]
        return (rows[:, :, None] == others[:, None, :]).astype(jnp.float32)
    if b.has_rows:
        return jnp.swapaxes(_gram(b, a), 1, 2)
    if a.has_rows:
        (rows,), (vectors,) = a.parts, b.parts
        rows = jnp.take_along_axis(vectors, rows[:, None, :], axis=2)
        return _views.widen(jnp.swapaxes(rows, 1, 2))
    grams = (
        _linalg.contract(x, y, ((2,), (2,)), ((0,), (0,)))
        for x, y in zip(a.parts, b.parts, strict=True)
    )
    return functools.reduce(jnp.add, grams)


def _root(squares: Any, side: _Side) -> jax.Array:
    """A root, a little too large, to cover squares that were flushed to zero."""
    if side.has_rows:
        return jnp.ones(side.parts[0].shape, jnp.float32)
    num_entries = sum(part.shape[2] for part in side.parts)
    return _root_of(squares, FLOOR * num_entries)


@jax.jit  # a program has one copy for all arrays of one shape
def _root_of(squares: jax.Array, floor: float) -> jax.Array:
    return jnp.sqrt(jnp.maximum(squares, 0) + floor)


def _extents(site: Site, recorded: Recorded) -> jax.Array:
    """The extent, the sum of |left| |right| over positions: (K,)."""
    sizes = (
        _root(sum(jnp.sum(_square(x), axis=-1) for x in side.parts), side)
        for side in _sides(site, recorded)
    )
    return jnp.sum(_times(*sizes), axis=1)


@jax.jit
def _times(a: jax.Array, b: jax.Array) -> jax.Array:
    dtype = at_least_float32(a.dtype, b.dtype)
    return a.astype(dtype) * b.astype(dtype)


def _roundings_of_extent(sizes: Sizes) -> int:
    return sizes.left + sizes.right + 2 * sizes.positions + sizes.groups
