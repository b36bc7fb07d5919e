"""Groups of arrays that are processed together, which keeps programs small.

A model may have hundreds of arrays. Small arrays are joined to larger ones before they
are added up. Random numbers are drawn for several arrays at once: small arrays share
one vector, and larger arrays of one shape share a stack, which a compiler can shard as
it shards the arrays.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpmp._fence import materialize

# Arrays of this many entries or fewer share a vector of random numbers.
_SMALL = 2**14

# The largest number of random numbers in a draw for more than one array.
_LARGEST_DRAW = 2**22

# At most this many arrays are concatenated at once.
_FEW_ARRAYS = 256


class Draw(NamedTuple):
    """Random numbers that are drawn at once."""

    shape: tuple[int, ...]
    # For the number of each array, its start and stop along the first axis.
    ranges: dict[int, tuple[int, int]]
    # Whether it is a vector for small arrays, which are sharded in ways of their own.
    is_of_small: bool = False

    def divided(
        self, sample: Callable[[], jax.Array], depends_on: jax.Array
    ) -> dict[int, jax.Array]:
        """Calls `sample` once; returns the random numbers of each array, by number."""
        if len(self.ranges) == 1:
            return dict.fromkeys(self.ranges, sample())
        starts = [start for start, _ in self.ranges.values()]
        sizes = [stop - start for start, stop in self.ranges.values()]
        parts = _parts(sample, starts, sizes, 0, depends_on)
        return dict(zip(self.ranges, parts, strict=True))


def draws(shapes: Sequence[tuple[int, ...]], kinds: Sequence[Hashable]) -> list[Draw]:
    """Plans the draws for arrays of given shapes; a draw serves arrays of one kind."""
    small: dict[Hashable, list[int]] = {}
    large: dict[Hashable, list[int]] = {}
    for i, (shape, kind) in enumerate(zip(shapes, kinds, strict=True)):
        if math.prod(shape) <= _SMALL:
            small.setdefault(kind, []).append(i)
        else:
            large.setdefault((kind, shape), []).append(i)
    found = []
    for some in small.values():
        stops = list(itertools.accumulate(math.prod(shapes[i]) for i in some))
        ranges = itertools.pairwise([0, *stops])
        found.append(Draw((stops[-1],), dict(zip(some, ranges, strict=True)), True))
    for numbers in large.values():
        shape = shapes[numbers[0]]
        most = max(1, _LARGEST_DRAW // math.prod(shape))
        for start in range(0, len(numbers), most):
            some = numbers[start : start + most]
            stacked = shape if len(some) == 1 else (len(some), *shape)
            found.append(Draw(stacked, {i: (k, k + 1) for k, i in enumerate(some)}))
    return found


def groups_of(
    sizes: Sequence[int], kinds: Sequence[Hashable], *, few: int
) -> list[list[int]]:
    """Groups the numbers of the arrays to join: those of one kind with few entries."""
    groups: dict[Hashable, list[int]] = {}
    for i, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        # An array with more entries has a group of its own, by its number.
        groups.setdefault((kind, i if size > few else None), []).append(i)
    return list(groups.values())


def join(arrays: Sequence[jax.Array], groups: list[list[int]]) -> list[jax.Array]:
    """Joins the arrays (..., n) of each group side by side."""
    return [_join([arrays[i] for i in group]) for group in groups]


def _join(arrays: list[jax.Array]) -> jax.Array:
    if len(arrays) == 1:
        return arrays[0]
    if len(arrays) > _FEW_ARRAYS:  # XLA's time to compile is quadratic
        starts = range(0, len(arrays), _FEW_ARRAYS)
        parts = [arrays[i : i + _FEW_ARRAYS] for i in starts]
        arrays = materialize(lambda: list(map(_join, parts)), arrays[0])
    return jnp.concatenate(arrays, axis=-1)


def split(
    joined: Sequence[jax.Array], groups: list[list[int]], sizes: Sequence[int]
) -> list[jax.Array]:
    """Splits joined arrays again, into the original order and the given sizes."""
    arrays: dict[int, jax.Array] = {}
    for x, group in zip(joined, groups, strict=True):
        parts = _split(x, [sizes[i] for i in group]) if len(group) > 1 else [x]
        arrays |= zip(group, parts, strict=True)
    return [arrays[i] for i in range(len(arrays))]


def _split(x: jax.Array, sizes: list[int]) -> list[jax.Array]:
    starts = [0, *itertools.accumulate(sizes[:-1])]
    return _parts(lambda: x, starts, sizes, -1, x)


def _parts(
    compute: Callable[[], jax.Array],
    starts: Sequence[int],
    sizes: Sequence[int],
    axis: int,
    depends_on: jax.Array,
) -> list[jax.Array]:
    """Computes an array once, and splits it at places that a compiler does not know."""
    # XLA would compile every part at a known place as a function of its own, and repeat
    # in each of them the computation of the array: minutes for a thousand scalars.
    x, *unknown = materialize(lambda: (compute(), *map(np.uint32, starts)), depends_on)
    return [
        jax.lax.dynamic_slice_in_dim(x, start, size, axis)
        for start, size in zip(unknown, sizes, strict=True)
    ]
