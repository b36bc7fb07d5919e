"""Chooses the cheapest exact way to compute the norm of each parameter's gradient.

A gradient is kept if it takes no more memory than the values that it is formed from,
and saves time. It is then formed once, stored in the place of these values, and read
for the norm and for the sum. The sum of kept gradients over the examples costs next to
nothing. The gradients of low-rank factors (LoRA) are an example: the backward pass
forms them where they arise, and nothing else is ever stored for them. After the
backward pass, those of convolutions are formed, for some examples at a time, and those
of loops whose iterations share a parameter.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from dpmp.engines.book_keeping import _norms, _uses
from dpmp.engines.book_keeping._norms import Term
from dpmp.engines.book_keeping._uses import Recorded, Site, dense


def make_terms(sites: Sequence[Site], shapes: Sequence[tuple[int, ...]]) -> list[Term]:
    """Chooses how to compute the squared norms of parameters of given shapes.

    The squared norm of a parameter is the sum of the terms that contain it.
    """
    terms, tangled = [], dict[int, tuple[int, ...]]()
    for param, shape in enumerate(shapes):
        if (entries := _entries(sites, param, shape)) is None:
            tangled[param] = shape
            continue
        for numbers in _components(entries):
            some = {i: entries[i] for i in numbers}
            terms.append(_cheapest_term(sites, some, param, shape))
    if tangled:
        used = {i: x for i, x in enumerate(sites) if x.view.leaves & tangled.keys()}
        terms.append(_norms.parameter_term(used, tangled))
    return terms


def tangled_params(
    sites: Sequence[Site], shapes: Sequence[tuple[int, ...]]
) -> list[int]:
    """Lists the parameters with a view that is not made of their entries alone."""
    return [i for i, shape in enumerate(shapes) if _entries(sites, i, shape) is None]


def _entries(
    sites: Sequence[Site], param: int, shape: tuple[int, ...]
) -> dict[int, np.ndarray] | None:
    """Finds, for each site of a parameter, the entries that the site's view is made of.

    The result is None if the view of some site is not made of entries alone. The
    entries are NumPy views, whose addresses and strides tell whether they overlap.
    """
    # This array is never read or written, so it costs no memory.
    array = np.empty(shape, np.int8)
    found = {}
    for i, site in enumerate(sites):
        if param not in site.view.leaves:
            continue
        if (entries := site.view.rearrange(array)) is None:
            return None
        found[i] = entries
    return found


def _components(entries: dict[int, np.ndarray]) -> list[list[int]]:
    """Divides sites into sets that have no entries in common."""
    components: list[list[int]] = []
    for i, x in entries.items():
        touched = [
            c for c in components if any(np.shares_memory(x, entries[j]) for j in c)
        ]
        rest = [c for c in components if c not in touched]
        components = [*rest, sorted([i, *itertools.chain(*touched)])]
    return components


def _cheapest_term(
    sites: Sequence[Site],
    entries: Mapping[int, np.ndarray],
    param: int,
    shape: tuple[int, ...],
) -> Term:
    used = {i: sites[i] for i in entries}
    number, first = next(iter(used.items()))
    is_alone = len(used) == 1
    if is_alone and first.outer is None:
        return _norms.entry_term(number, first, param)
    if is_alone:
        formed = _norms.product_term(number, first, param)
    else:
        formed = _norms.parameter_term(used, {param: shape})
    terms = [formed]
    if (swapped := _orientations(used, entries)) is not None:
        terms.append(_norms.gram_term(used, swapped, param))
    cheapest = min(terms, key=lambda term: term.cost)
    if is_alone:
        kept = kept_term(number, first, param)
        return kept if _is_better(kept, cheapest, first) else cheapest
    return cheapest


def _orientations(
    sites: Mapping[int, Site], entries: Mapping[int, np.ndarray]
) -> list[bool] | None:
    """Tells which sites exchange left and right, compared with the first site.

    The result is None if the outer products of the sites do not have the same sides.
    """
    if len(sites) == 1:
        return [False]
    sides = []
    for i, x in entries.items():
        outer = sites[i].outer
        if outer is None or outer.axes is None:
            return None
        groups, left, right = (
            tuple((x.shape[k], x.strides[k]) for k in part if x.shape[k] > 1)
            for part in outer.axes
        )
        sides.append((x.__array_interface__["data"][0], groups, left, right))
    first = sides[0]
    swapped = *first[:2], first[3], first[2]
    is_same = all(side in (first, swapped) for side in sides)
    return [side != first for side in sides] if is_same else None


def kept_term(number: int, site: Site, param: int) -> Term:
    """Makes the term of a gradient of the outer form that is kept."""
    formed = _norms.product_term(number, site, param)
    entries = _norms.entry_term(number, dense(site), param)
    cost = formed.cost + entries.cost * _norms.COST_OF_AN_ENTRY
    return dataclasses.replace(entries, form="kept", cost=cost)


def _is_better(kept: Term, other: Term, site: Site) -> bool:
    """Whether both memory and time favour keeping a site's gradient."""
    assert site.outer is not None
    if _num_bytes(dense(site).cotangent) > _num_bytes(
        site.outer.record, site.cotangent
    ):
        return False
    groups, positions, left, right = site.outer.sizes
    cost_of_sum = groups * positions * right * (1 if site.outer.has_rows else left)
    return kept.cost < other.cost + cost_of_sum


def _num_bytes(*arrays: jax.ShapeDtypeStruct) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


def dense_if_kept(terms: Sequence[Term], sites: Sequence[Site]) -> list[Site]:
    """Returns the sites of a plan; those with a kept gradient become dense."""
    kept = _sites_to_keep(terms)
    return [dense(site) if i in kept else site for i, site in enumerate(sites)]


def _sites_to_keep(terms: Sequence[Term]) -> list[int]:
    return [term.sites[0] for term in terms if term.form == "kept"]


def formed_early(terms: Sequence[Term], sites: Sequence[Site]) -> list[int]:
    """The sites whose gradients are kept, and may be formed in the backward pass.

    A plan may leave some of them to `keep` (`make_plan`).
    """
    return [i for i in _sites_to_keep(terms) if not _has_patches(sites[i])]


def _has_patches(site: Site) -> bool:
    """Whether it is a convolution, whose patches are larger than its input."""
    return site.outer is not None and site.outer.axes is None


def keep(
    terms: Sequence[Term], sites: Sequence[Site], recorded: Sequence[Recorded]
) -> list[Recorded]:
    """Forms the gradients to keep, in the place of what a batch recorded for them.

    The backward pass has formed those of dense sites.
    """
    recorded = list(recorded)
    for i in _sites_to_keep(terms):
        if sites[i].outer is None:
            continue
        form = functools.partial(_uses.gradient, sites[i])
        chunk = num_examples = len(recorded[i].cotangent)
        if _has_patches(sites[i]):
            chunk = max(8, num_examples // 4)
        recorded[i] = Recorded(None, _norms.in_chunks(form, recorded[i], chunk))
    return recorded
