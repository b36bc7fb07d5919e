"""Kept gradients: formed once, stored, and read for the norm and for the sum.

A gradient is kept if it takes no more memory than the values that it is formed from,
and saves time. The gradients of convolutions are an example. A kept gradient replaces
these values in memory, and its sum over the examples costs next to nothing.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax

from dpmp.engines.book_keeping import _gradients, _norms
from dpmp.engines.book_keeping._gradients import Recorded
from dpmp.engines.book_keeping._norms import Term
from dpmp.engines.book_keeping._sites import Site, dense


def kept_term(site: Site, number: int, param: int, records: Any) -> Term:
    """Makes the term of a gradient of the outer form that is kept.

    Args:
      site: a site of the plan.
      number: the number of the site.
      param: the number of its parameter.
      records: shapes and dtypes of the recorded values.
    """
    formed = _norms.product_term(site, number, param, records)
    entries = _norms.entry_term(dense(site), number, param)
    cost = formed.cost + entries.cost * _norms.COST_OF_AN_ENTRY
    return dataclasses.replace(entries, form="kept", cost=cost)


def is_better(kept: Term, other: Term, site: Site, records: Any) -> bool:
    """Whether both memory and time favour keeping a site's gradient."""
    arrays = [*(records[i] for i in site.records), site.cotangent]
    if _num_bytes([dense(site).cotangent]) > _num_bytes(arrays):
        return False
    return kept.cost < other.cost + _cost_of_sum(site, records)


def _cost_of_sum(site: Site, records: Any) -> float:
    """The cost of a weighted sum of gradients that are not kept, for one example."""
    groups, positions, left, right = _gradients.sizes_of(site, records)
    is_of_rows = _gradients.num_rows_of(site) is not None
    return groups * positions * right * (1 if is_of_rows else left)


def _num_bytes(arrays: Sequence[Any]) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


def dense_if_kept(terms: Sequence[Term], sites: Sequence[Site]) -> list[Site]:
    """Returns the sites of a plan; those with a kept gradient become dense."""
    kept = {term.sites[0] for term in terms if term.form == "kept"}
    return [dense(site) if i in kept else site for i, site in enumerate(sites)]


def keep(terms: Sequence[Term], sites: Sequence[Site], recorded: Recorded) -> Recorded:
    """Forms the gradients to keep, and drops the values that nothing reads any more.

    Args:
      terms: the terms of all sites.
      sites: the sites of the plan.
      recorded: the records of all examples, with a leading axis.
    """
    records, grads = recorded[0], list(recorded[1])
    for i in (term.sites[0] for term in terms if term.form == "kept"):
        form = functools.partial(_gradients.gradient, sites[i], i)
        if (chunk := _num_at_a_time(sites[i], len(grads[i]))) < len(grads[i]):
            grads[i] = jax.lax.map(form, recorded, batch_size=chunk)
        else:
            grads[i] = jax.vmap(form)(recorded)
    is_read = {
        number for site in dense_if_kept(terms, sites) for number in site.records
    }
    return [x if i in is_read else None for i, x in enumerate(records)], grads


def _num_at_a_time(site: Site, num_examples: int) -> int:
    """Limits the chunk for convolutions, whose patches are larger than their input."""
    has_places = site.outer is not None and site.outer.axes is None
    return max(8, num_examples // 4) if has_places else num_examples
