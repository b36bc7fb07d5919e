"""Adds noise to sums on grids: independent noise, or correlated with earlier noise."""

import functools
from collections.abc import Callable, Sequence
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import _meshes
from dpmp._fence import materialize
from dpmp.noise_addition._discrete_gaussian import DiscreteGaussian
from dpmp.numerics import GridArray, packing
from dpmp.strategies import GRID, LOG_GRID, BandedToeplitz

# Noise in 1 / GRID, which turns noise in whole units into noise on this finer grid.
_FRACTIONS = DiscreteGaussian((1,))


def add_noise(
    leaves: Sequence[GridArray],
    stddev: Fraction,
    key_words: jax.Array,
    step: jax.Array,
    past: Sequence[jax.Array] = (),
    strategy: BandedToeplitz | None = None,
) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
    """Adds noise of at least `stddev` to every entry.

    The program of one draw has about a thousand instructions. So one draw makes the
    noise of several leaves at once (`packing.draws`).

    Returns:
      The sums in float32, and the noise of the last steps for the first leaves, as in
      `past`, with which the noise of these leaves is correlated.
    """
    found: dict[int, list[jax.Array]] = {}
    shapes = [leaf.counts.shape for leaf in leaves]
    kinds = [(leaf.unit, i < len(past)) for i, leaf in enumerate(leaves)]
    draws = packing.draws(shapes, kinds)
    for number, draw in enumerate(draws):
        unit, is_correlated = kinds[min(draw.ranges)]
        noises = {number: DiscreteGaussian.at_least(stddev / Fraction(unit or 1))}
        if is_correlated:
            noises[len(draws) + number] = _FRACTIONS
        samples = [
            functools.partial(noise.sample, key_words, draw.shape, step=step, leaf=i)
            for i, noise in noises.items()
        ]
        # This branch keeps the compiler from repeating the draw in every reader of the
        # sums, and frees the memory of the noise. The branch in `Draw.divided` keeps it
        # from repeating the draw in every leaf.
        add = functools.partial(_add_draw, draw, leaves, samples, step, past, strategy)
        found |= materialize(add, step)
    noisy = [found[i][0] for i in range(len(leaves))]
    # Outside of the branch, the noise is written into donated arrays without a copy.
    return noisy, tuple(
        jax.lax.dynamic_update_index_in_dim(x, found[i][1], step % len(x), 0)
        for i, x in enumerate(past)
    )


def _add_draw(
    draw: packing.Draw,
    leaves: Sequence[GridArray],
    samples: Sequence[Callable[[], jax.Array]],
    step: jax.Array,
    past: Sequence[jax.Array],
    strategy: BandedToeplitz | None,
) -> dict[int, list[jax.Array]]:
    """Adds one draw to its leaves.

    If there is a second sample, of fractions, the noise is correlated.

    Returns, by number, each noisy leaf, and its noise if that is correlated.
    """
    found = {}
    divided = [draw.divided(sample, step) for sample in samples]
    for i, leaf in ((i, leaves[i]) for i in draw.ranges):
        parts = [x[i] for x in divided]
        if draw.is_of_small:
            # Otherwise each device would send its part of a joint vector to all others.
            parts = map(_meshes.on_every_device, parts)
        noise, *fractions = (x.reshape(leaf.counts.shape) for x in parts)
        kept = []
        if fractions and strategy is not None:
            noise = _correlated(noise, fractions[0], past[i], step, strategy)
            kept = [noise]
        found[i] = [GridArray(leaf.counts + noise, leaf.unit).to_float(), *kept]
    return found


def _correlated(
    units: jax.Array,
    fractions: jax.Array,
    past: jax.Array,
    step: jax.Array,
    strategy: BandedToeplitz,
) -> jax.Array:
    """The noise of a step, from independent noise and the noise of earlier steps.

    The independent noise is `units` + `fractions` / `GRID`. As `GRID` is at most 64,
    this is discrete Gaussian noise on the finer grid (`_discrete_gaussian.py`, with k =
    64). Sums of 32 bits may wrap around in between: the result is in range, except for
    noise of 16 standard deviations, which is less likely than 2^-180.
    """
    rest = fractions + np.int32(GRID // 2)  # to round to nearest
    numerators = np.array(strategy.numerators[1:], np.int32)
    for i, noise in enumerate(past):
        # The age of the noise is 0 for that of the last step.
        age = (step - np.int32(1 + i)) % np.int32(len(numerators))
        numerator = jnp.asarray(numerators)[age]
        units = units - numerator * (noise >> np.int32(LOG_GRID))
        rest = rest - numerator * (noise & np.int32(GRID - 1))
    return units + (rest >> np.int32(LOG_GRID))
