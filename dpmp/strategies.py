"""Strategies to correlate the noise of steps, so that it partly cancels in their sum.

Parameters are the sum of all updates so far. If the noise of a step subtracts a part of
the noise of the steps before it, the sum has less noise. A *strategy* is a lower
triangular matrix C: the Gaussian mechanism protects C G, where the rows of G are the
sums of clipped gradients of all steps, and the noise of the steps is the inverse of C
times independent noise.

>>> strategy = banded_toeplitz(8, iterations=256)
>>> print(strategy.coefficients[:4])
(1.0, 0.6875, 0.59375, 0.546875)
>>> independent = BandedToeplitz((1.0,), iterations=256)
>>> print(f"{strategy.error():.2f} instead of {independent.error():.2f}")
4.55 instead of 11.34

An example must not take part twice within a band. `DPSGD(strategy=)` therefore draws
batches by `batch_selection.CyclicPoissonSampling`.

References:
  [Kairouz et al.: Practical and private (deep) learning without sampling or
  shuffling](https://arxiv.org/abs/2103.00039); [Choquette-Choo et al.: (Amplified)
  banded matrix factorization](https://arxiv.org/abs/2306.08153); [McKenna: Scaling up
  the banded matrix factorization mechanism](https://arxiv.org/abs/2405.15913)
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from scipy import optimize, signal

from dpmp import _validate

__all__ = ["BandedToeplitz", "banded_toeplitz"]

# Coefficients are multiples of 1 / GRID, so that noise is computed in integers. For up
# to 64 bands, the error is less than 0.05 % above that of the best coefficients.
LOG_GRID = 6
GRID = 2**LOG_GRID


@dataclass(frozen=True)
class BandedToeplitz:
    """A Toeplitz strategy: the noise of a step depends on that of the last few steps.

    Let c_0 = 1, c_1, ... be the coefficients, and W_t independent noise. The noise of
    step t is N_t = W_t - c_1 N_{t-1} - c_2 N_{t-2} - ...

    Attributes:
      coefficients: c_0 = 1, and others from -1 to 1, which are rounded to multiples of
        1/64. Their number is the number of bands.
      iterations: the number of steps that it is for.
    """

    coefficients: tuple[float, ...]
    iterations: int

    def __post_init__(self):
        _validate.fields(self, iterations=_validate.positive_integer)
        given = [_validate.as_real(x) for x in self.coefficients]
        _validate.require(
            given[:1] == [1.0] and all(abs(x) <= 1 for x in given),
            "coefficients must begin with 1, and all must be from -1 to 1",
            coefficients=self.coefficients,
            fix="Use strategies.banded_toeplitz(8, iterations=...).",
        )
        rounded = tuple(round(x * GRID) / GRID for x in given)
        object.__setattr__(self, "coefficients", rounded)
        _validate.require(
            self.noise_gain <= 16,
            "coefficients must let noise die out: the noise of a step would have more "
            "than 16 times the standard deviation of independent noise",
            coefficients=self.coefficients,
            fix="Use smaller coefficients.",
        )

    @property
    def bands(self) -> int:
        """The number of steps that share noise."""
        return len(self.coefficients)

    @property
    def numerators(self) -> tuple[int, ...]:
        """The coefficients as multiples of 1 / `GRID`."""
        return tuple(int(x * GRID) for x in self.coefficients)

    @functools.cached_property
    def sensitivity(self) -> float:
        """The norm of the coefficients, rounded up.

        It is the norm of a column of C: the sensitivity if every example takes part
        once with a contribution of norm 1.
        """
        square = sum(Fraction(x) ** 2 for x in self.coefficients)
        root = math.sqrt(square)
        return root if Fraction(root) ** 2 >= square else math.nextafter(root, math.inf)

    @functools.cached_property
    def noise_gain(self) -> float:
        """The standard deviation of N_t over that of W_t, in the last step."""
        return float(np.linalg.norm(_response(self.coefficients, self.iterations)))

    @property
    def widening(self) -> float:
        """By which factor more units than independent noise need must have room.

        Noise of four draws leaves room for a noise gain of almost 2.
        """
        return self.sensitivity * max(1.0, self.noise_gain / 1.9)

    def error(self, *, momentum: float = 0.0, at_end: bool = False) -> float:
        """The error of the parameters, for noise multiplier 1 and sensitivity 1.

        It is the root mean square of the noise in the sum of all updates so far, over
        all steps, in units of one contribution. With `momentum`, the updates are those
        of SGD with momentum. With `at_end`, it is that of the sum of all updates alone.
        """
        factors = _factors(
            np.array(self.coefficients), self.iterations, _checked(momentum)
        )
        weights = 1 if at_end else _weights(self.iterations)
        return math.sqrt(np.sum(weights * factors**2)) * self.sensitivity


def banded_toeplitz(
    bands: int, *, iterations: int, momentum: float = 0.0
) -> BandedToeplitz:
    """The strategy of a number of bands with the least error.

    More bands have less error for the same noise multiplier, but need a larger one:
    with b bands, an example takes part in every b-th step at most, and with b times the
    probability. Each band stores one integer for every parameter.

    Args:
      bands: the number of bands, at most `iterations`; 1 for independent noise.
      iterations: the number of steps.
      momentum: see `BandedToeplitz.error`.

    Raises:
      ValueError: for arguments out of range.
    """
    iterations = _validate.positive_integer(
        iterations=iterations, fix="Use the number of updates."
    )
    bands = _validate.integer_in(
        range(1, iterations + 1),
        f"bands must be from 1 to iterations = {iterations}. Use 8, for example.",
        bands=bands,
    )
    momentum = _checked(momentum)
    if bands == 1:
        return BandedToeplitz((1.0,), iterations)

    def loss(tail: np.ndarray) -> tuple[float, np.ndarray]:
        """The logarithm of the squared error, and its gradient."""
        coefficients = np.append(1.0, tail)
        square = coefficients @ coefficients
        mean_square, gradient = _mean_square(coefficients, iterations, momentum)
        value = math.log(mean_square * square)
        return value, (gradient / mean_square + 2 * coefficients / square)[1:]

    # The best strategy of any number of bands is close to the square root of the sum.
    steps = np.arange(1, bands)
    start = np.cumprod((2 * steps - 1) / (2 * steps))
    found: Any = optimize.minimize(
        loss,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=[(0, 1)] * (bands - 1),
        options={"maxiter": 1000, "ftol": 1e-13},
    )
    return BandedToeplitz((1.0, *found.x.tolist()), iterations)


def _checked(momentum: Any) -> float:
    momentum = _validate.as_real(momentum)
    _validate.require(
        0 <= momentum < 1,
        "momentum must be at least 0 and below 1",
        momentum=momentum,
        fix="Use 0.9, for example.",
    )
    return momentum


def _mean_square(
    coefficients: np.ndarray, iterations: int, momentum: float
) -> tuple[float, np.ndarray]:
    """The mean square of the noise in all sums for unit noise W, and its gradient."""
    factors = _factors(coefficients, iterations, momentum)
    weights = _weights(iterations)
    changes: Any = signal.lfilter([1.0], coefficients, factors)
    weighted = -2 * weights * factors
    gradient = [
        weighted[k:] @ changes[: iterations - k] for k in range(len(coefficients))
    ]
    return float(weights @ factors**2), np.array(gradient)


def _factors(coefficients: np.ndarray, iterations: int, momentum: float) -> Any:
    """By which factor noise of one step enters the sum a number of steps later."""
    sums = np.convolve([1.0, -1.0], [1.0, -momentum])
    return signal.lfilter([1.0], sums, _response(coefficients, iterations))


def _weights(iterations: int) -> np.ndarray:
    """Which share of all sums noise enters after a number of steps."""
    return 1 - np.arange(iterations) / iterations


def _response(coefficients: Sequence[float] | np.ndarray, iterations: int) -> Any:
    """The first column of the inverse of C."""
    return signal.lfilter([1.0], coefficients, np.eye(1, iterations)[0])
