"""Arrays that are dealt with together, so that programs of hundreds of them stay small.

Small arrays are joined to larger ones before they are added up. And random numbers are
drawn for several arrays at once: for small ones as one vector, and for larger ones of
one shape as a stack, which a compiler can shard as it shards the arrays.
"""

import itertools
import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Arrays of this many entries or fewer share a vector of random numbers.
_SMALL = 2**14

# What is drawn at once has at most so many entries, if it is for more than one array.
_LARGEST_DRAW = 2**22


class Draw(NamedTuple):
    """Random numbers that are drawn at once.

    Attributes:
      shape: of what is drawn.
      ranges: which of it, along the first axis, is for which array: from a start to a
        stop, by the number of the array.
    """

    shape: tuple[int, ...]
    ranges: dict[int, tuple[int, int]]


def draws(shapes: Sequence[tuple[int, ...]], kinds: Sequence[Hashable]) -> list[Draw]:
    """What to draw for arrays of some shapes; those of one draw are of one kind."""
    small: dict[Hashable, list[int]] = {}
    large: dict[Hashable, list[int]] = {}
    for i, (shape, kind) in enumerate(zip(shapes, kinds, strict=True)):
        if math.prod(shape) <= _SMALL:
            small.setdefault(kind, []).append(i)
        else:
            large.setdefault((kind, shape), []).append(i)
    found = [_vector(shapes, some) for some in small.values()]
    for some in large.values():
        shape = shapes[some[0]]
        most = max(1, _LARGEST_DRAW // math.prod(shape))
        starts = range(0, len(some), most)
        found += [_stack(shape, some[start : start + most]) for start in starts]
    return found


def _vector(shapes: Sequence[tuple[int, ...]], numbers: Sequence[int]) -> Draw:
    sizes = [math.prod(shapes[i]) for i in numbers]
    stops = list(itertools.accumulate(sizes))
    starts = [0, *stops]
    return Draw(
        (sum(sizes),), dict(zip(numbers, zip(starts, stops, strict=False), strict=True))
    )


def _stack(shape: tuple[int, ...], numbers: Sequence[int]) -> Draw:
    shape = shape if len(numbers) == 1 else (len(numbers), *shape)
    return Draw(shape, {i: (k, k + 1) for k, i in enumerate(numbers)})


def groups_of(
    sizes: Sequence[int], kinds: Sequence[Hashable], *, few: int
) -> list[list[int]]:
    """Which arrays to join: their numbers, in groups, every number once.

    Args:
      sizes: how many entries each array has.
      kinds: only arrays of one kind are joined.
      few: arrays of more entries stay alone.
    """
    small: dict[Hashable, list[int]] = {}
    groups = []
    for i, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        if size > few:
            groups.append([i])
            continue
        if kind not in small:
            small[kind] = []
            groups.append(small[kind])
        small[kind].append(i)
    return groups


def join(arrays: Sequence[jax.Array], groups: list[list[int]]) -> list[jax.Array]:
    """One array for each group: its arrays (..., n), side by side."""
    return [
        arrays[group[0]]
        if len(group) == 1
        else jnp.concatenate([arrays[i] for i in group], axis=-1)
        for group in groups
    ]


def split(
    joined: Sequence[jax.Array], groups: list[list[int]], sizes: Sequence[int]
) -> list[jax.Array]:
    """The arrays that were joined, in their first order, of the given sizes."""
    arrays: dict[int, jax.Array] = {}
    for x, group in zip(joined, groups, strict=True):
        if len(group) == 1:
            arrays[group[0]] = x
            continue
        stops = itertools.accumulate(sizes[i] for i in group)
        for i, stop in zip(group, stops, strict=True):
            arrays[i] = jax.lax.slice_in_dim(x, stop - sizes[i], stop, axis=-1)
    return [arrays[i] for i in range(len(arrays))]
