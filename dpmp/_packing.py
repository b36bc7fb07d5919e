"""Small arrays joined to large ones, so that a program has few of them to deal with."""

import itertools
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp


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
