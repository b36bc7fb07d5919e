"""Norms of per-example gradients, from what was recorded at their sites.

A parameter's gradient is the sum over its sites. Where these are of different entries,
squared norms add up; where they are of the same ones, with

    <G_a, G_b> = sum over positions t, s of <left_at, left_bs> <right_at, right_bs>

(ghost norms: Goodfellow, 2015; Li et al., 2021) as long as that is cheaper than to form
G. What remains is formed, one example at a time if need be, and sent back to the
parameters.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpmp._stored import at_least_float32
from dpmp.book_keeping import _products, _views
from dpmp.book_keeping._sites import Site
from dpmp.book_keeping._views import View

# As many examples at a time as have temporary arrays of this size.
_CHUNK_ENTRIES = 2**23

# What it takes to write an entry and to read it again, in multiplications.
_COST_OF_AN_ENTRY = 16

# What was recorded of one example: values by number, and a cotangent for each site.
Recorded = tuple[list[jax.Array], list[jax.Array]]


@dataclass(frozen=True)
class Term:
    """A part of the squared norms that is computed as one.

    Attributes:
      form: "entries" (the gradient is there), "gram" (inner products of positions),
        "product" (the gradient is formed) or "parameters" (and sent back to them).
      sites: their numbers.
      params: the parameters whose squared norms it is part of.
      squared_norms: from what was recorded of one example to that part for each of
        `params`, given the values of all roots.
      cost: multiplications for one example.
      size: float32 entries of temporary memory for one example.
    """

    form: str
    sites: list[int]
    params: list[int]
    squared_norms: Callable[[Any, Recorded], list[jax.Array]]
    cost: float
    size: float


def make_terms(
    sites: Sequence[Site], params: Sequence[View], records: list[Any]
) -> list[Term]:
    """Chooses how to compute the squared norms of all parameters.

    Args:
      sites: of the program of one example.
      params: the roots that are parameters.
      records: shapes and dtypes of the recorded values.

    Returns:
      Terms; the squared norm of a parameter is the sum of those that it is in.
    """
    of_param = {
        _root(x): [i for i, site in enumerate(sites) if _root(x) in site.view.leaves]
        for x in params
    }
    terms, tangled = [], list[int]()
    for param in params:
        root = _root(param)
        entries = _entries(param, [sites[i].view for i in of_param[root]])
        if entries is None:
            tangled.append(root)
            continue
        entries_of = dict(zip(of_param[root], entries, strict=True))
        for numbers in _components(entries_of):
            some = {i: entries_of[i] for i in numbers}
            terms.append(_cheapest_term(sites, some, param, records))
    if tangled:
        numbers = sorted({i for root in tangled for i in of_param[root]})
        some = [x for x in params if x.root in tangled]
        terms.append(_parameter_term(sites, numbers, some, records))
    return terms


def _root(view: View) -> int:
    assert view.root is not None
    return view.root


def _entries(param: View, views: Sequence[View]) -> list[np.ndarray] | None:
    """Which entries of a parameter its views are made of; None if any does not say."""
    # Memory that is never touched costs nothing.
    array = np.empty(param.aval.shape, np.int8)
    entries = [view.rearrange(array) for view in views]
    return None if any(x is None for x in entries) else entries  # type: ignore[return-value]


def _components(entries: dict[int, np.ndarray]) -> list[list[int]]:
    """Sites in sets that have no entries in common."""
    components: list[list[int]] = []
    for i, x in entries.items():
        touched = [c for c in components if any(_overlap(x, entries[j]) for j in c)]
        rest = [c for c in components if c not in touched]
        components = [*rest, sorted([i, *itertools.chain(*touched)])]
    return components


def _overlap(a: np.ndarray, b: np.ndarray) -> bool:
    try:
        return np.shares_memory(a, b, max_work=10_000)
    except np.exceptions.TooHardError:
        return True


def _cheapest_term(
    sites: Sequence[Site], entries: dict[int, np.ndarray], param: View, records: Any
) -> Term:
    numbers = list(entries)
    first = sites[numbers[0]]
    if len(numbers) == 1 and first.outer is None:
        return _entry_term(first, numbers[0], param)
    terms = [_parameter_term(sites, numbers, [param], records)]
    if len(numbers) == 1:
        terms = [_product_term(first, numbers[0], param, records)]
    if (swapped := _orientations(sites, entries)) is not None:
        terms.append(_gram_term(sites, swapped, param, records))
    return min(terms, key=lambda term: term.cost)


def _orientations(
    sites: Sequence[Site], entries: dict[int, np.ndarray]
) -> dict[int, bool] | None:
    """For sites of the same entries whether left is what is right in the first.

    None for sites whose products have no sides in common.
    """
    if len(entries) == 1:
        return dict.fromkeys(entries, False)
    swapped, first = {}, None
    for i, x in entries.items():
        outer = sites[i].outer
        if outer is None or outer.axes is None:
            return None
        groups, left, right = (
            tuple((x.shape[k], x.strides[k]) for k in part if x.shape[k] > 1)
            for part in outer.axes
        )
        side = (x.__array_interface__["data"][0], groups, left, right)
        first = side if first is None else first
        if side not in (first, (*first[:2], first[3], first[2])):
            return None
        swapped[i] = side != first
    return swapped


def _entry_term(site: Site, number: int, param: View) -> Term:
    def squared_norms(roots: Any, recorded: Recorded) -> list[jax.Array]:
        del roots
        return [_sum_of_squares(recorded[1][number])]

    size = math.prod(site.cotangent.shape)
    return Term("entries", [number], [_root(param)], squared_norms, size, 0)


def _sum_of_squares(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(x.astype(at_least_float32(x.dtype))))


def _product_term(site: Site, number: int, param: View, records: Any) -> Term:
    groups, positions, left, right = _sizes(site, records)

    def squared_norms(roots: Any, recorded: Recorded) -> list[jax.Array]:
        del roots
        return [_sum_of_squares(_product(site, number, recorded))]

    size = groups * left * right
    cost = size * (positions + _COST_OF_AN_ENTRY)
    return Term("product", [number], [_root(param)], squared_norms, cost, size)


def _gram_term(
    sites: Sequence[Site], swapped: dict[int, bool], param: View, records: Any
) -> Term:
    """Of sites that have the entries of one parameter in common."""
    sizes = {i: _sizes(sites[i], records) for i in swapped}

    def squared_norms(roots: Any, recorded: Recorded) -> list[jax.Array]:
        del roots
        sides = {}
        for i, is_swapped in swapped.items():
            left, right = factors(sites[i], i, recorded)
            num_rows = sites[i].outer.num_rows  # type: ignore[union-attr]
            pair = _Side(left, num_rows), _Side(right, None)
            sides[i] = pair[::-1] if is_swapped else pair
        total = jnp.zeros((), jnp.float32)
        for a, b in itertools.combinations_with_replacement(sides, 2):
            grams = [_gram(x, y) for x, y in zip(sides[a], sides[b], strict=True)]
            total += (1 if a == b else 2) * jnp.sum(grams[0] * grams[1])
        return [total]

    num_positions = sum(x.positions for x in sizes.values())
    groups, _, left, right = sizes[next(iter(swapped))]
    squares = groups * num_positions**2
    cost = squares * (left + right + _COST_OF_AN_ENTRY)
    return Term("gram", list(swapped), [_root(param)], squared_norms, cost, 2 * squares)


class _Side(NamedTuple):
    """Vectors (K, T, n), or numbers of rows (K, T) out of n."""

    values: jax.Array
    num_rows: int | None


def _gram(a: _Side, b: _Side) -> jax.Array:
    """Inner products of all positions: (K, T_a, T_b)."""
    if a.num_rows is not None and b.num_rows is not None:
        return (a.values[:, :, None] == b.values[:, None, :]).astype(jnp.float32)
    if b.num_rows is not None:
        return jnp.swapaxes(_gram(b, a), 1, 2)
    if a.num_rows is not None:
        rows = jnp.take_along_axis(b.values, a.values[:, None, :], axis=2)
        return jnp.swapaxes(rows, 1, 2).astype(jnp.float32)
    return _products.contract(a.values, b.values, ((2,), (2,)), ((0,), (0,)))


def _parameter_term(
    sites: Sequence[Site], numbers: list[int], params: Sequence[View], records: Any
) -> Term:
    """Of any sites: their gradients are formed and sent back to the parameters."""
    views = [sites[i].view for i in numbers]

    def squared_norms(roots: Any, recorded: Recorded) -> list[jax.Array]:
        grads = [gradient(sites[i], i, recorded) for i in numbers]
        of_params = pull_back(views, [_root(x) for x in params], roots, grads)
        return [_sum_of_squares(grad) for grad in of_params]

    size = sum(math.prod(x.aval.shape) for x in params)
    cost = float(size)
    for i in numbers:
        num_entries = math.prod(sites[i].view.aval.shape)
        is_outer = sites[i].outer is not None
        positions = _sizes(sites[i], records).positions if is_outer else 0
        size += num_entries
        cost += num_entries * (positions + _COST_OF_AN_ENTRY)
    roots = [_root(x) for x in params]
    return Term("parameters", numbers, roots, squared_norms, cost, size)


class _Sizes(NamedTuple):
    """Of a sum of outer products: groups, positions, and the sides of a product."""

    groups: int
    positions: int
    left: int
    right: int


def _sizes(site: Site, records: list[Any]) -> _Sizes:
    assert site.outer is not None
    chosen = [records[i] for i in site.records]
    left, right = jax.eval_shape(site.outer.factors, chosen, site.cotangent)
    n = site.outer.num_rows or left.shape[-1]
    return _Sizes(*right.shape[:2], n, right.shape[-1])


def factors(site: Site, number: int, recorded: Recorded) -> tuple[jax.Array, jax.Array]:
    """Left and right of one example."""
    records, cotangents = recorded
    assert site.outer is not None
    return site.outer.factors([records[i] for i in site.records], cotangents[number])


def _product(site: Site, number: int, recorded: Recorded) -> jax.Array:
    """The gradient of a site of the outer form: (K, n, m)."""
    assert site.outer is not None
    left, right = factors(site, number, recorded)
    if (num_rows := site.outer.num_rows) is None:
        product = _products.contract(left, right, ((1,), (1,)), ((0,), (0,)))
        return _products.apart(product)
    rows = jnp.zeros((left.shape[0], num_rows, right.shape[-1]), jnp.float32)
    add = jax.vmap(lambda total, i, x: total.at[i].add(x, mode="promise_in_bounds"))
    return add(rows, left, right.astype(jnp.float32))


def gradient(site: Site, number: int, recorded: Recorded) -> jax.Array:
    """The gradient of a site's view, for one example, in float32 or wider."""
    if site.outer is None:
        grad = recorded[1][number]
        return grad.astype(at_least_float32(grad.dtype))
    return site.outer.to_view(_product(site, number, recorded))


def pull_back(
    views: Sequence[View], params: Sequence[int], roots: Any, grads: list[jax.Array]
) -> list[jax.Array]:
    """From gradients of views to those of parameters, in float32 or wider."""
    primals = [
        jnp.asarray(roots[i]).astype(at_least_float32(roots[i].dtype)) for i in params
    ]

    def evaluate(*values: jax.Array) -> list[jax.Array]:
        return _views.evaluate(views, {**roots, **dict(zip(params, values, strict=True))})

    outputs, vjp = jax.vjp(evaluate, *primals)
    return list(vjp([g.astype(x.dtype) for g, x in zip(grads, outputs, strict=True)]))


def squared_norms(terms: Sequence[Term], roots: Any, recorded: Recorded) -> Any:
    """The squared norms of all parameters.

    Args:
      terms: of all sites.
      roots: the values of parameters and constants.
      recorded: of all examples, with a leading axis.

    Returns:
      For each parameter with a site its squared norms, (B,).
    """
    totals: dict[int, jax.Array] = {}
    for term in terms:
        one = functools.partial(_of_one, term, roots)
        num_examples = jax.tree.leaves(recorded)[0].shape[0]
        chunk = max(1, int(_CHUNK_ENTRIES / max(term.size, 1)))
        if chunk >= num_examples:
            values = jax.vmap(one)(recorded)
        else:
            values = jax.lax.map(one, recorded, batch_size=chunk)
        for root, value in zip(term.params, values, strict=True):
            totals[root] = totals[root] + value if root in totals else value
    return totals


def _of_one(term: Term, roots: Any, recorded: Recorded) -> list[jax.Array]:
    return term.squared_norms(roots, recorded)
