"""Gradients that are formed once, for norm and sum.

Where the gradient of an example takes no more memory than what it is formed from, as
those of convolutions, it is kept in the place of that: its sum over examples then costs
next to nothing.
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
    """The term of a gradient of the outer form that is kept.

    Args:
      site: of the plan.
      number: of the site.
      param: its parameter.
      records: shapes and dtypes of the recorded values.
    """
    formed = _norms.product_term(site, number, param, records)
    entries = _norms.entry_term(dense(site), number, param)
    cost = formed.cost + entries.cost * _norms.COST_OF_AN_ENTRY
    return dataclasses.replace(entries, form="kept", cost=cost)


def is_better(kept: Term, other: Term, site: Site, records: Any) -> bool:
    """Whether memory and time speak for keeping a site's gradient."""
    arrays = [*(records[i] for i in site.records), site.cotangent]
    if _num_bytes([dense(site).cotangent]) > _num_bytes(arrays):
        return False
    return kept.cost < other.cost + _cost_of_sum(site, records)


def _cost_of_sum(site: Site, records: Any) -> float:
    """Of a weighted sum of gradients that are not kept, for one example."""
    groups, positions, left, right = _gradients.sizes_of(site, records)
    is_of_rows = _gradients.num_rows_of(site) is not None
    return groups * positions * right * (1 if is_of_rows else left)


def _num_bytes(arrays: Sequence[Any]) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


def dense_if_kept(terms: Sequence[Term], sites: Sequence[Site]) -> list[Site]:
    """The sites of a plan, as norms and sums meet them."""
    kept = {term.sites[0] for term in terms if term.form == "kept"}
    return [dense(site) if i in kept else site for i, site in enumerate(sites)]


def keep(terms: Sequence[Term], sites: Sequence[Site], recorded: Recorded) -> Recorded:
    """Forms the gradients that are kept, in place of what they are formed from.

    Args:
      terms: of all sites.
      sites: of the plan.
      recorded: of all examples, with a leading axis.
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
    """What is seen from all places of a window is several times what is recorded."""
    has_places = site.outer is not None and site.outer.axes is None
    return max(8, num_examples // 4) if has_places else num_examples
