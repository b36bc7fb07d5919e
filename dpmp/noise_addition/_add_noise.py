"""Adds noise to sums on grids: independent noise, or correlated with earlier noise."""

import functools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import _meshes
from dpmp._fence import materialize
from dpmp.noise_addition._discrete_gaussian import DiscreteGaussian
from dpmp.numerics import GridArray, packing
from dpmp.strategies import BandedInverse, BandedToeplitz, Strategy

# Noise in fractions of a unit, which are multiples of the grid of the coefficients.
# With a `BandedToeplitz`, it turns noise in whole units into noise on the finer grid.
_FRACTIONS = DiscreteGaussian((1,))
# With a `BandedInverse`, it hides which points of that grid other noise reaches, if its
# width is above twice the sum of absolute coefficients, which is at most 2.
_WIDE_FRACTIONS = DiscreteGaussian.at_least(4.01 * 2**BandedInverse.LOG_GRID)


def first_past(strategy: Strategy, leaves: Sequence[Any]) -> tuple[jax.Array, ...]:
    """The `NoiseState.past` with which a sequence of correlated noise begins."""
    earlier = strategy.bands - 1
    if isinstance(strategy, BandedInverse):
        return (jnp.zeros((earlier, 5), jnp.uint32),)
    return tuple(jnp.zeros((earlier, *jnp.shape(x)), jnp.int32) for x in leaves)


def add_noise(
    leaves: Sequence[GridArray],
    stddev: Fraction,
    key_words: jax.Array,
    step: jax.Array,
    past: Sequence[jax.Array] = (),
    strategy: Strategy | None = None,
) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
    """Adds noise of at least `stddev`; returns sums in float32, and the next `past`.

    With a `BandedToeplitz`, the noise of as many leaves is correlated as have noise of
    earlier steps.
    """
    found: dict[int, list[jax.Array]] = {}
    shapes = [leaf.counts.shape for leaf in leaves]
    is_inverse = isinstance(strategy, BandedInverse)
    num_banded = 0 if is_inverse else len(past)
    kinds = [(leaf.unit, i < num_banded) for i, leaf in enumerate(leaves)]
    draws = packing.draws(shapes, kinds)
    for number, draw in enumerate(draws):
        unit, is_banded = kinds[min(draw.ranges)]
        noises = {number: DiscreteGaussian.at_least(stddev / Fraction(unit or 1))}
        if is_banded or is_inverse:
            fractions = _WIDE_FRACTIONS if is_inverse else _FRACTIONS
            noises[len(draws) + number] = fractions
        samples = [
            functools.partial(noise.sample, shape=draw.shape, leaf=i)
            for i, noise in noises.items()
        ]
        if is_inverse:
            samples = [functools.partial(_combined, *samples, past[0], strategy)]
        samples = [functools.partial(x, key_words, step=step) for x in samples]
        # This branch keeps the compiler from repeating the draw in every reader of the
        # sums, and frees the memory of the noise. The branch in `Draw.divided` keeps it
        # from repeating the draw in every leaf.
        add = functools.partial(_add_draw, draw, leaves, samples, step, past, strategy)
        found |= materialize(add, step)
    noisy = [found[i][0] for i in range(len(leaves))]
    if is_inverse:
        row = jnp.concatenate([jnp.ones(1, jnp.uint32), key_words])
        return noisy, (jnp.concatenate([row[None], past[0][:-1]]),)
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
    strategy: Strategy | None,
) -> dict[int, list[jax.Array]]:
    """Returns, by number, each noisy leaf of a draw, and its noise if correlated.

    If there is a second sample, of fractions, the noise is correlated.
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
        if fractions and isinstance(strategy, BandedToeplitz):
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

    The independent noise is `units` + `fractions` / 64, which is discrete Gaussian
    noise on the finer grid (`_discrete_gaussian.py`, with k = 64). Sums of 32 bits may
    wrap around in between: the result is in range, except for noise of 16 standard
    deviations, which is less likely than 2^-180.
    """
    rest = fractions + np.int32(2**strategy.LOG_GRID // 2)  # to round to nearest
    numerators = np.array(strategy.numerators[1:], np.int32)
    for i, noise in enumerate(past):
        # The age of the noise is 0 for that of the last step.
        age = (step - np.int32(1 + i)) % np.int32(len(numerators))
        numerator = jnp.asarray(numerators)[age]
        whole, part = _split(noise, strategy)
        units, rest = units - numerator * whole, rest - numerator * part
    return units + _split(rest, strategy)[0]


def _combined(
    sample: Callable[..., jax.Array],
    sample_fractions: Callable[..., jax.Array],
    earlier: jax.Array,
    strategy: BandedInverse,
    key_words: jax.Array,
    *,
    step: jax.Array,
) -> jax.Array:
    """The noise of a step, from independent noise of this step and of earlier ones.

    `earlier` has a row for each earlier step, newest first: whether there was such a
    step since the sequence began, and the four words of its key. Sums of 32 bits may
    wrap around in between, as in `_correlated`.
    """
    rest = sample_fractions(key_words, step=step)
    rest += np.int32(2**strategy.LOG_GRID // 2)  # to round to nearest

    def add(sums: tuple[jax.Array, jax.Array], term: Any) -> tuple[Any, None]:
        numerator, row, age = term
        numerator *= row[0].astype(jnp.int32)
        noise = sample(row[1:], step=step - age.astype(step.dtype))
        whole, part = _split(noise, strategy)
        return (sums[0] + numerator * whole, sums[1] + numerator * part), None

    numerators = np.array(strategy.numerators[1:], np.int32)
    terms = numerators, earlier, np.arange(1, strategy.bands)
    sums = sample(key_words, step=step), rest
    (units, rest), _ = jax.lax.scan(add, sums, terms)
    return units + _split(rest, strategy)[0]


def _split(x: jax.Array, strategy: Strategy) -> tuple[jax.Array, jax.Array]:
    """Whole multiples of 2^LOG_GRID, rounded down, and the rest."""
    log_grid = strategy.LOG_GRID
    return x >> np.int32(log_grid), x & np.int32(2**log_grid - 1)
