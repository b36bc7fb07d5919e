"""Discrete Gaussian noise for the leaves of a tree, in programs that stay small.

A draw takes a thousand instructions of a program. So noise is drawn for several leaves
at once: for small ones as one vector, and for larger ones of one shape as a stack,
which a compiler can shard as it shards the leaves.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

import jax

from dpmp._discrete_gaussian import DiscreteGaussian
from dpmp._fence import behind_a_branch
from dpmp._grid import GridArray

# Leaves of this many entries or fewer share a vector.
_SMALL = 2**14

# What is drawn at once has at most so many entries, if it is for more than one leaf.
_LARGEST_DRAW = 2**22


class _Draw(NamedTuple):
    """Noise that is drawn at once.

    Attributes:
      shape: of the noise.
      ranges: which of it, along the first axis, is for which leaf: from a start to a
        stop, by the number of the leaf.
    """

    shape: tuple[int, ...]
    ranges: dict[int, tuple[int, int]]


def add_noise(
    leaves: Sequence[GridArray],
    stddev: Fraction,
    key_words: jax.Array,
    step: jax.Array,
) -> list[jax.Array]:
    """Adds independent noise to every entry of every leaf.

    Args:
      leaves: multiples of the units of their grids.
      stddev: of the noise, at least, in the unit of the sum.
      key_words: (4,) uint32; see `DiscreteGaussian.sample`.
      step: another one for every release under a key.

    Returns:
      The sums, rounded to float32.
    """
    noisy: dict[int, jax.Array] = {}
    for number, draw in enumerate(_draws(leaves)):
        unit = leaves[min(draw.ranges)].unit
        sample = functools.partial(
            DiscreteGaussian.at_least(stddev / Fraction(unit or 1)).sample,
            key_words,
            draw.shape,
            step=step,
            leaf=number,
        )
        # One branch keeps the noise apart from whatever reads the sums, and ends its
        # time in memory; another one, inside, from the leaves that share it.
        add = functools.partial(_add_draw, draw, leaves, sample, step)
        noisy |= behind_a_branch(add, step)
    return [noisy[i] for i in range(len(leaves))]


def _add_draw(
    draw: _Draw,
    leaves: Sequence[GridArray],
    sample: Callable[[], jax.Array],
    step: jax.Array,
) -> dict[int, jax.Array]:
    """The leaves of a draw, with noise, by number."""
    if len(draw.ranges) == 1:
        (i,) = draw.ranges
        return {i: _add(leaves[i], sample())}
    noise = behind_a_branch(sample, step)
    return {
        i: _add(leaves[i], jax.lax.slice_in_dim(noise, start, stop))
        for i, (start, stop) in draw.ranges.items()
    }


def _add(leaf: GridArray, noise: jax.Array) -> jax.Array:
    steps = leaf.steps + noise.reshape(leaf.steps.shape)
    return GridArray(steps, leaf.unit).to_float()


def _draws(leaves: Sequence[GridArray]) -> list[_Draw]:
    """All draws for some leaves; those of one draw are on one grid."""
    small: dict[float, list[int]] = {}
    large: dict[tuple[float, tuple[int, ...]], list[int]] = {}
    for i, leaf in enumerate(leaves):
        if leaf.steps.size <= _SMALL:
            small.setdefault(leaf.unit, []).append(i)
        else:
            large.setdefault((leaf.unit, leaf.steps.shape), []).append(i)
    draws = [
        _vector([leaves[i].steps.size for i in some], some) for some in small.values()
    ]
    for (_, shape), some in large.items():
        most = max(1, _LARGEST_DRAW // math.prod(shape))
        stacks = [some[start : start + most] for start in range(0, len(some), most)]
        draws += [_stack(shape, stack) for stack in stacks]
    return draws


def _vector(sizes: Sequence[int], leaves: Sequence[int]) -> _Draw:
    stops = list(itertools.accumulate(sizes))
    ranges = {
        i: (stop - size, stop)
        for i, size, stop in zip(leaves, sizes, stops, strict=True)
    }
    return _Draw((sum(sizes),), ranges)


def _stack(shape: tuple[int, ...], leaves: Sequence[int]) -> _Draw:
    shape = shape if len(leaves) == 1 else (len(leaves), *shape)
    return _Draw(shape, {i: (k, k + 1) for k, i in enumerate(leaves)})
