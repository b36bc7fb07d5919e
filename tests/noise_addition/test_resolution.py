import math

import pytest

from dpmp.noise_addition import choose_resolution
from dpmp.noise_addition._discrete_gaussian import DiscreteGaussian
from dpmp.numerics import BoundedSums, ExactSums


@pytest.mark.parametrize("noise_multiplier", [1e-4, 0.01, 0.3, 0.634, 1.0, 3.7, 20.0])
@pytest.mark.parametrize("num_parameters", [100, 10**7, 10**9])
def test_the_noise_is_as_wide_as_accounted_for(noise_multiplier, num_parameters):
    resolution = choose_resolution(noise_multiplier, num_parameters, ExactSums())
    noise = DiscreteGaussian.at_least(noise_multiplier * resolution)
    excess = noise.effective_stddev / (noise_multiplier * resolution)
    # The largest contribution has a whole number of units, and 2^-21 is kept free.
    assert 1 <= excess <= 1 + 1.01 / resolution + 2.0**-20
    # What rounding takes, unless the noise is as wide as it can be, or a third draw
    # could not help.
    taken = num_parameters / (8 * resolution**2)
    assert taken <= 0.01 or noise.effective_stddev > 4e6


@pytest.mark.parametrize(
    ("noise_multiplier", "num_parameters", "num_draws", "share"),
    [
        (1.0, 10**6, 3, 0.003),
        (1.0, 10**9, 3, 0.01),
        (1.0, 8 * 10**9, 4, 0.006),
        (4.0, 7 * 10**10, 4, 0.016),
        (16.0, 10**9, 4, 0.01),
    ],
)
def test_bounded_sums_of_large_models_get_finer_grids(
    noise_multiplier, num_parameters, num_draws, share
):
    resolution = choose_resolution(noise_multiplier, num_parameters, BoundedSums())
    noise = DiscreteGaussian.at_least(noise_multiplier * resolution)
    assert len(noise.multipliers) == num_draws
    assert resolution <= 2**24
    assert math.sqrt(num_parameters) / resolution <= share


@pytest.mark.parametrize(
    ("noise_multiplier", "num_parameters", "message"),
    [
        (80_000.0, 10**7, "must cost at most 5% of the clip norm.*num_par"),
        (8000.0, 10**9, "must cost at most 5%"),
        (1e8, 1, "Use less noise.*larger epsilon or delta.*pass num_parameters"),
        (1e-3, 10**13, "num_parameters=10+. Use"),
        (5e-5, 10**7, "exact noise must have at least 256 units"),
    ],
)
def test_noise_and_models_that_no_grid_fits_are_refused(
    noise_multiplier, num_parameters, message
):
    with pytest.raises(ValueError, match=message):
        choose_resolution(noise_multiplier, num_parameters, ExactSums())
