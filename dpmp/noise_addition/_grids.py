"""How fine the grid of a sum is, so that the sampler can make its noise."""

import math
from fractions import Fraction

from dpmp import _validate
from dpmp.noise_addition._discrete_gaussian import DiscreteGaussian
from dpmp.numerics import (
    DEFAULT_RESOLUTION,
    LARGEST_RESOLUTION,
    LARGEST_ROUNDING_SHARE,
    Arithmetic,
    arithmetic_without_privacy,
)

# Float sums are rounded to a grid that is so fine that rounding costs 1/4096 of the
# noise. But the standard deviation of the noise must have between 2^14 and 2^21 units
# of the grid, because the sampler cannot make much wider noise, and sums must fit into
# 32 bits.
_LOG_ROUNDING_SHARE = 12
_LOG_UNITS = (14, 20)


def grid_of_floats(stddev: float, rounding_cost: float) -> tuple[float, Fraction]:
    """The unit of the grid, and the stddev, wider by `rounding_cost` of these units."""
    if not 1e-24 <= stddev <= 1e30:
        _validate.fail(
            "the noise of a float sum must have a stddev from 1e-24 to 1e30. Rescale "
            "the loss: float32 cannot handle other sizes.",
            stddev=stddev,
        )
    lowest, highest = _LOG_UNITS
    finest = math.ceil(math.log2(max(rounding_cost, 1.0))) + _LOG_ROUNDING_SHARE
    log_units = min(max(finest, lowest), highest)
    unit = 2.0 ** (math.frexp(stddev)[1] - 1 - log_units)
    width = Fraction(stddev) / Fraction(unit) + Fraction(rounding_cost * (1 + 2.0**-20))
    return unit, width * Fraction(unit)


def choose_resolution(
    noise_multiplier: float, num_parameters: int, arithmetic: Arithmetic
) -> int | None:
    """The number of units in the largest contribution; None for a sum without a grid.

    Rounding to a coarse grid takes a share of the clip norm. But the sampler of the
    noise limits how fine the grid may be: more draws allow a finer grid. Noise of three
    draws is used if two would cost a share above 1 %, and noise of four draws if three
    would cost a share above 2 %.
    """
    wanted = arithmetic.wanted_resolution(num_parameters)
    if wanted is None:
        return None
    wanted = max(math.ceil(wanted), DEFAULT_RESOLUTION)
    usual, finest = LARGEST_RESOLUTION, arithmetic.largest_resolution
    for num_draws, largest, allowed in (
        (2, usual, 0.01),
        (3, usual, 0.02),
        (4, finest, LARGEST_ROUNDING_SHARE),
    ):
        stddev = noise_multiplier * (min(wanted, largest) + 1)
        noise = DiscreteGaussian.at_most(stddev, num_draws)
        # The margin keeps the rounding of the unit to float32 from needing wider noise.
        widest = noise.effective_stddev / noise_multiplier * (1 - 2.0**-21)
        resolution = min(max(1, int(widest)), largest)
        loss = arithmetic.rounding_share(num_parameters, resolution)
        if loss <= allowed:
            break
    if not loss <= LARGEST_ROUNDING_SHARE:
        _validate.fail(
            f"rounding to a grid must cost at most {LARGEST_ROUNDING_SHARE:.0%} of "
            "the clip norm. Use less noise (which a larger epsilon or delta allows), "
            "pass num_parameters if there are fewer, or use method='per_example' "
            "(exact sums have coarser grids) or "
            f"arithmetic='{arithmetic_without_privacy(arithmetic.method)}'.",
            cost=f"{loss:.2g}",
            noise_multiplier=noise_multiplier,
            num_parameters=num_parameters,
        )
    narrowest = DiscreteGaussian((1,)).effective_stddev
    # 1 % less than the narrowest noise is enough: `resolution` was rounded down, and
    # `DiscreteGaussian.at_least` widens the noise again.
    if not 1.01 * noise_multiplier * resolution >= narrowest:
        _validate.fail(
            f"exact noise must have at least {narrowest:.0f} units of the grid. Use "
            "more noise, no noise at all (0), or arithmetic='float32'.",
            noise_multiplier=noise_multiplier,
            resolution=resolution,
        )
    return resolution
