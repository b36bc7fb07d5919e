"""Chooses the cheapest exact way to compute the norm of each parameter's gradient."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpmp.engines.book_keeping import _kept, _norms
from dpmp.engines.book_keeping._norms import Term
from dpmp.engines.book_keeping._sites import Site
from dpmp.engines.book_keeping._views import View


def make_terms(
    sites: Sequence[Site], params: Sequence[View], records: list[Any]
) -> list[Term]:
    """Chooses how to compute the squared norms of all parameters.

    Args:
      sites: the sites of the program of one example.
      params: the roots that are parameters.
      records: shapes and dtypes of the recorded values.

    Returns:
      The terms. The squared norm of a parameter is the sum of the terms that contain
      it.
    """
    terms, tangled = [], list[View]()
    for param in params:
        if (entries := _entries(sites, param)) is None:
            tangled.append(param)
            continue
        for numbers in _components(entries):
            some = {i: entries[i] for i in numbers}
            terms.append(_cheapest_term(sites, some, param, records))
    if tangled:
        numbers = {i for param in tangled for i in _sites_of(sites, param)}
        terms.append(_norms.parameter_term(sites, sorted(numbers), tangled, records))
    return terms


def tangled_params(sites: Sequence[Site], params: Sequence[View]) -> list[int]:
    """Lists the roots of parameters with a view that is not made of entries alone."""
    return [_root(param) for param in params if _entries(sites, param) is None]


def _root(view: View) -> int:
    assert view.root is not None
    return view.root


def _sites_of(sites: Sequence[Site], param: View) -> list[int]:
    return [i for i, site in enumerate(sites) if _root(param) in site.view.leaves]


def _entries(sites: Sequence[Site], param: View) -> dict[int, np.ndarray] | None:
    """Finds, for each site of a parameter, the entries that the site's view is made of.

    The result is None if the view of some site is not made of entries alone. The
    entries are NumPy views, whose addresses and strides tell whether they overlap.
    """
    # This array is never read or written, so it costs no memory.
    array = np.empty(param.aval.shape, np.int8)
    found = {}
    for i in _sites_of(sites, param):
        if (entries := sites[i].view.rearrange(array)) is None:
            return None
        found[i] = entries
    return found


def _components(entries: dict[int, np.ndarray]) -> list[list[int]]:
    """Divides sites into sets that have no entries in common."""
    components: list[list[int]] = []
    for i, x in entries.items():
        touched = [c for c in components if any(_overlap(x, entries[j]) for j in c)]
        rest = [c for c in components if c not in touched]
        components = [*rest, sorted([i, *itertools.chain(*touched)])]
    return components


def _overlap(a: np.ndarray, b: np.ndarray) -> bool:
    return np.shares_memory(a, b)


def _cheapest_term(
    sites: Sequence[Site], entries: dict[int, np.ndarray], param: View, records: Any
) -> Term:
    numbers = list(entries)
    first = sites[numbers[0]]
    if len(numbers) == 1 and first.outer is None:
        return _norms.entry_term(first, numbers[0], _root(param))
    terms = [_norms.parameter_term(sites, numbers, [param], records)]
    if len(numbers) == 1:
        terms = [_norms.product_term(first, numbers[0], _root(param), records)]
    if (swapped := _orientations(sites, entries)) is not None:
        terms.append(_norms.gram_term(sites, swapped, _root(param), records))
    cheapest = min(terms, key=lambda term: term.cost)
    if len(numbers) == 1:
        kept = _kept.kept_term(first, numbers[0], _root(param), records)
        return kept if _kept.is_better(kept, cheapest, first, records) else cheapest
    return cheapest


def _orientations(
    sites: Sequence[Site], entries: dict[int, np.ndarray]
) -> dict[int, bool] | None:
    """Tells which sites exchange left and right, compared with the first site.

    The result is None if the outer products of the sites do not have the same sides.
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
