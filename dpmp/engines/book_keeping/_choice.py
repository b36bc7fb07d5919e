"""Chooses the cheapest exact way to compute the norm of each parameter's gradient.

A per-example gradient is stored if it takes no more memory than the activations and
cotangents that it is computed from, and saves time. It is then materialized once, held
in memory instead of these arrays, and read for the norm and for the sum. The backward
pass materializes such gradients where they arise, as those of low-rank factors (LoRA).
Those of convolutions, and of loops whose iterations share a parameter, are materialized
after it.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from dpmp.engines.book_keeping import _norms, _uses
from dpmp.engines.book_keeping._norms import NormMethod
from dpmp.engines.book_keeping._uses import Cached, Use, dense


def choose(uses: Sequence[Use], shapes: Sequence[tuple[int, ...]]) -> list[NormMethod]:
    """Chooses the norm methods of parameters of given shapes.

    The squared norm of a parameter is the sum over the norm methods that contain it.
    """
    chosen, others = [], dict[int, tuple[int, ...]]()
    for param, shape in enumerate(shapes):
        if (entries := _entries(uses, param, shape)) is None:
            others[param] = shape
            continue
        for numbers in _components(entries):
            some = {i: entries[i] for i in numbers}
            chosen.append(_cheapest(uses, some, param, shape))
    if others:
        used = {i: x for i, x in enumerate(uses) if x.view.leaves & others.keys()}
        chosen.append(_norms.by_parameters(used, others))
    return chosen


def used_through_arithmetic(
    uses: Sequence[Use], shapes: Sequence[tuple[int, ...]]
) -> list[int]:
    """Lists the parameters with a view that does not consist of their entries alone."""
    return [i for i, shape in enumerate(shapes) if _entries(uses, i, shape) is None]


def _entries(
    uses: Sequence[Use], param: int, shape: tuple[int, ...]
) -> dict[int, np.ndarray] | None:
    """Finds, for each use of a parameter, the entries that its view consists of.

    The result is None if the view of some use does not consist of entries alone. The
    entries are NumPy views, whose addresses and strides tell whether they overlap.
    """
    # This array is never read or written, so it costs no memory.
    array = np.empty(shape, np.int8)
    found = {}
    for i, use in enumerate(uses):
        if param not in use.view.leaves:
            continue
        if (entries := use.view.rearrange(array)) is None:
            return None
        found[i] = entries
    return found


def _components(entries: dict[int, np.ndarray]) -> list[list[int]]:
    """Divides uses into sets that have no entries in common."""
    components: list[list[int]] = []
    for i, x in entries.items():
        touched = [
            c for c in components if any(np.shares_memory(x, entries[j]) for j in c)
        ]
        rest = [c for c in components if c not in touched]
        components = [*rest, sorted([i, *itertools.chain(*touched)])]
    return components


def _cheapest(
    uses: Sequence[Use],
    entries: Mapping[int, np.ndarray],
    param: int,
    shape: tuple[int, ...],
) -> NormMethod:
    used = {i: uses[i] for i in entries}
    number, first = next(iter(used.items()))
    is_alone = len(used) == 1
    if is_alone and first.outer is None:
        return _norms.by_entries(number, first, param)
    if is_alone:
        methods = [_norms.by_product(number, first, param)]
    else:
        methods = [_norms.by_parameters(used, {param: shape})]
    if (swapped := _orientations(used, entries)) is not None:
        methods.append(_norms.by_gram(used, swapped, param))
    cheapest = min(methods, key=lambda method: method.flops)
    if is_alone:
        stored = _by_stored_gradient(number, first, param)
        return stored if _is_better(stored, cheapest, first) else cheapest
    return cheapest


def _orientations(
    uses: Mapping[int, Use], entries: Mapping[int, np.ndarray]
) -> list[bool] | None:
    """Tells which uses exchange left and right, compared with the first use.

    The result is None if the outer products of the uses do not have the same sides.
    """
    if len(uses) == 1:
        return [False]
    sides = []
    for i, x in entries.items():
        outer = uses[i].outer
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


def _by_stored_gradient(number: int, use: Use, param: int) -> NormMethod:
    """The norm method of a gradient of the outer form that is stored."""
    product = _norms.by_product(number, use, param)
    entries = _norms.by_entries(number, dense(use), param)
    flops = product.flops + entries.flops * _norms.FLOPS_PER_ENTRY
    return dataclasses.replace(entries, form="stored", flops=flops)


def _is_better(stored: NormMethod, other: NormMethod, use: Use) -> bool:
    """Whether both memory and time favour storing the gradient of a use."""
    assert use.outer is not None
    if _uses.num_bytes([dense(use)]) > _uses.num_bytes([use]):
        return False
    groups, positions, left, right = use.outer.sizes
    flops_of_sum = groups * positions * right * (1 if use.outer.has_rows else left)
    return stored.flops < other.flops + flops_of_sum


def is_materialized_early(use: Use) -> bool:
    """Whether the backward pass materializes the gradient of a use, if it is stored."""
    return not use.is_shared and not _has_patches(use)


def _has_patches(use: Use) -> bool:
    """Whether a use is a convolution, whose patches are larger than its input."""
    return use.outer is not None and use.outer.axes is None


def store_gradient(use: Use, cached: Cached) -> Cached:
    """Replaces the cached arrays of a batch by the gradients of a use."""
    materialize = functools.partial(_uses.gradient, use)
    num_examples = len(cached.cotangent)
    chunk = max(8, num_examples // 4) if _has_patches(use) else num_examples
    return Cached(None, _norms.in_chunks(materialize, cached, chunk))
