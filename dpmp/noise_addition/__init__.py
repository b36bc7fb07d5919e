"""Privatizers: optax transformations that add calibrated noise to a clipped sum.

>>> privatizer = gaussian_privatizer(stddev=1.0)
>>> noise_state = privatizer.init({"w": jnp.zeros(3)})
>>> noisy, noise_state = privatizer.update({"w": jnp.ones(3)}, noise_state)

Everything that goes in is sensitive, and everything that comes out is released.
`gaussian_privatizer` draws integers, whose privacy can be proved;
`continuous_gaussian_privatizer` draws floats, as other libraries do, for comparison.
"""

from dpmp.noise_addition._privatizers import (
    NoiseState,
    continuous_gaussian_privatizer,
    gaussian_privatizer,
)

__all__ = [
    "NoiseState",
    "continuous_gaussian_privatizer",
    "gaussian_privatizer",
]
