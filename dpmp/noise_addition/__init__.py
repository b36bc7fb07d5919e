"""Privatizers: optax transformations that add calibrated noise to a clipped sum.

>>> privatizer = gaussian_privatizer(stddev=1.0)
>>> noise_state = privatizer.init({"w": jnp.zeros(3)})
>>> noisy, noise_state = privatizer.update({"w": jnp.ones(3)}, noise_state)

The input of `update` is sensitive. Its first output is released, so any optax
transformations after it cost no more privacy. The state holds the key of the noise,
which is secret.
"""

from dpmp.noise_addition._add_noise import first_past
from dpmp.noise_addition._discrete_gaussian import NOISE_TOTAL_VARIATION
from dpmp.noise_addition._grids import choose_resolution
from dpmp.noise_addition._privatizers import (
    NoiseState,
    correlated_gaussian_privatizer,
    gaussian_privatizer,
)

__all__ = [
    "NOISE_TOTAL_VARIATION",
    "NoiseState",
    "choose_resolution",
    "correlated_gaussian_privatizer",
    "first_past",
    "gaussian_privatizer",
]
