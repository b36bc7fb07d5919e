"""Chooses the resolution of the grid of a sum, for the noise that the sum receives."""

import math

from dpmp import _validate
from dpmp.noise_addition._discrete_gaussian import DiscreteGaussian
from dpmp.numerics import (
    DEFAULT_RESOLUTION,
    LARGEST_RESOLUTION,
    LARGEST_ROUNDING_SHARE,
    Arithmetic,
    arithmetic_without_privacy,
)


def choose_resolution(
    noise_multiplier: float, num_parameters: int, arithmetic: Arithmetic
) -> int | None:
    """The number of units in the largest contribution; None for a sum without a grid.

    Rounding to a coarse grid takes a share of the clip norm. But the sampler of the
    noise limits how fine the grid may be. Noise of three draws allows a finer grid than
    noise of two draws. It is used if two draws would cost a share above 1 %.

    Raises:
      ValueError: if rounding costs too much of the clip norm, or if the noise is too
        narrow for the sampler.
    """
    wanted = arithmetic.wanted_resolution(num_parameters)
    if wanted is None:
        return None
    wanted = min(max(math.ceil(wanted), DEFAULT_RESOLUTION), LARGEST_RESOLUTION)
    for num_draws in (2, 3):
        noise = DiscreteGaussian.at_most(noise_multiplier * (wanted + 1), num_draws)
        # The margin keeps the rounding of the unit to float32 from needing wider noise.
        widest = noise.effective_stddev / noise_multiplier * (1 - 2.0**-21)
        resolution = max(1, int(widest))
        loss = arithmetic.rounding_share(num_parameters, resolution)
        if loss <= 0.01:
            break
    if loss > LARGEST_ROUNDING_SHARE:
        _validate.fail(
            f"rounding to a grid must cost at most {LARGEST_ROUNDING_SHARE:.0%} of the "
            "clip norm",
            cost=f"{loss:.2g}",
            noise_multiplier=noise_multiplier,
            num_parameters=num_parameters,
            fix="Use less noise (which a larger epsilon or delta allows), pass "
            "num_parameters if there are fewer, or use arithmetic='"
            f"{arithmetic_without_privacy(arithmetic.method)}'.",
        )
    resolution = min(resolution, LARGEST_RESOLUTION)
    narrowest = DiscreteGaussian((1,)).effective_stddev
    # 1 % less than the narrowest noise is enough: `resolution` was rounded down, and
    # `DiscreteGaussian.at_least` widens the noise again.
    _validate.require(
        1.01 * noise_multiplier * resolution >= narrowest,
        f"exact noise must have at least {narrowest:.0f} units of the grid",
        noise_multiplier=noise_multiplier,
        resolution=resolution,
        fix="Use more noise, no noise at all (0), or arithmetic='float32'.",
    )
    return resolution
