"""Adds discrete Gaussian noise to the leaves of a tree, in small programs.

The program of one draw has about a thousand instructions. So one draw makes the noise
of several leaves at once (`_packing.draws`).
"""

import functools
from collections.abc import Callable, Sequence
from fractions import Fraction

import jax

from dpmp import _meshes
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
    """Adds noise of at least `stddev` to every entry; returns the sums in float32."""
    noisy: dict[int, jax.Array] = {}
    shapes = [leaf.counts.shape for leaf in leaves]
    draws = _packing.draws(shapes, [leaf.unit for leaf in leaves])
    for number, draw in enumerate(draws):
        unit = leaves[min(draw.ranges)].unit
        noise = DiscreteGaussian.at_least(stddev / Fraction(unit or 1))
        sample = functools.partial(
            noise.sample, key_words, draw.shape, step=step, leaf=number
        )
        # This branch keeps the compiler from repeating the draw in every reader of the
        # sums, and frees the memory of the noise. The branch in `Draw.divided` keeps it
        # from repeating the draw in every leaf.
        add = functools.partial(_add_draw, draw, leaves, sample, step)
        noisy |= behind_a_branch(add, step)
    return [noisy[i] for i in range(len(leaves))]


def _add_draw(
    draw: _packing.Draw,
    leaves: Sequence[GridArray],
    sample: Callable[[], jax.Array],
    step: jax.Array,
) -> dict[int, jax.Array]:
    """Adds one draw to its leaves; returns the noisy leaves by number."""
    noisy = {}
    for i, noise in draw.divided(sample, step).items():
        # Else each device would send its part of a joint vector to all others.
        whole = _meshes.on_every_device(noise) if draw.is_of_small else noise
        counts = leaves[i].counts + whole.reshape(leaves[i].counts.shape)
        noisy[i] = GridArray(counts, leaves[i].unit).to_float()
    return noisy
