"""Discrete Gaussian noise for the leaves of a tree, in programs that stay small.

A draw takes a thousand instructions of a program. So noise is drawn for several leaves
at once (`_packing.draws`).
"""

import functools
from collections.abc import Callable, Sequence
from fractions import Fraction

import jax

from dpmp._fence import behind_a_branch
from dpmp.noise_addition._discrete_gaussian import DiscreteGaussian
from dpmp.numerics import _packing
from dpmp.numerics._grid import GridArray


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
    shapes = [leaf.steps.shape for leaf in leaves]
    draws = _packing.draws(shapes, [leaf.unit for leaf in leaves])
    for number, draw in enumerate(draws):
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
    draw: _packing.Draw,
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
