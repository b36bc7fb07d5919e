"""Finds the strategies with the least error."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import optimize, signal

from dpmp import _validate
from dpmp.strategies._matrices import (
    BandedInverse,
    BandedToeplitz,
    checked_momentum,
    sums_of_updates,
    weights_of_steps,
)


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
      momentum: see `Strategy.error`.

    Raises:
      ValueError: for arguments out of range.
    """
    iterations, bands = _checked_sizes(iterations, bands, 1)
    momentum = checked_momentum(momentum)
    if bands == 1:
        return BandedToeplitz((1.0,), iterations)
    sums, weights = sums_of_updates(iterations, momentum), weights_of_steps(iterations)

    def loss(tail: np.ndarray) -> tuple[float, np.ndarray]:
        """The logarithm of the squared error, and its gradient."""
        coefficients = np.append(1.0, tail)
        square = coefficients @ coefficients
        factors: Any = signal.lfilter([1.0], coefficients, sums)
        mean_square = weights @ factors**2
        # A coefficient changes the factors like a further filter.
        change: Any = signal.lfilter([1.0], coefficients, factors)
        gradient = -2 * _correlation(weights * factors, change, bands)
        value = math.log(mean_square * square)
        return value, (gradient / mean_square + 2 * coefficients / square)[1:]

    # The best strategy of any number of bands is close to the square root of the sum.
    steps = np.arange(1, bands)
    start = np.cumprod((2 * steps - 1) / (2 * steps))
    tail = _minimum(loss, start, bounds=[(0.0, 1.0)] * (bands - 1))
    return BandedToeplitz((1.0, *tail.tolist()), iterations)


def banded_inverse(
    bands: int, *, iterations: int, steps_per_epoch: int, momentum: float = 0.0
) -> BandedInverse:
    """The strategy whose inverse has a number of bands, with the least error.

    It needs no memory, and draws noise once for each band and once more in each step.
    Examples take turns in a fixed order, which does not amplify privacy as random
    batches do. So it is for few epochs and a large epsilon.

    >>> strategy = banded_inverse(4, iterations=500, steps_per_epoch=500)
    >>> print([round(x, 2) for x in strategy.coefficients])
    [1.0, -0.42, -0.13, -0.39]

    Args:
      bands: the number of bands, from 2 to `iterations`.
      iterations: the number of steps.
      steps_per_epoch: the number of examples over the batch size, rounded.
      momentum: see `Strategy.error`.

    Raises:
      ValueError: for arguments out of range.
    """
    iterations, bands = _checked_sizes(iterations, bands, 2)
    steps_per_epoch = _validate.positive_integer(
        steps_per_epoch=steps_per_epoch, fix="Use round(num_examples / batch_size)."
    )
    sums, weights = (
        sums_of_updates(iterations, checked_momentum(momentum)),
        weights_of_steps(iterations),
    )
    turns = np.zeros(iterations)
    turns[::steps_per_epoch] = 1

    def shares(logits: np.ndarray) -> np.ndarray:
        """Positive numbers with a sum below 1."""
        largest = max(logits.max(), 0.0)
        exponentials = np.exp(logits - largest)
        return exponentials / (math.exp(-largest) + exponentials.sum())

    def loss(logits: np.ndarray) -> tuple[float, np.ndarray]:
        """The logarithm of the squared error, and its gradient."""
        tail = shares(logits)
        coefficients = np.append(1.0, -tail)
        factors: Any = signal.lfilter(coefficients, [1.0], sums)
        mean_square = weights @ factors**2
        of_factors = 2 * _correlation(weights * factors, sums, bands)
        columns: Any = signal.lfilter([1.0], coefficients, turns)
        square = columns @ columns
        change: Any = signal.lfilter([1.0], coefficients, columns)
        of_columns = -2 * _correlation(columns, change, bands)
        gradient = -(of_factors / mean_square + of_columns / square)[1:]
        value = math.log(mean_square * square)
        return value, tail * (gradient - tail @ gradient)

    # Sums below 1: in proportion to the inverse of the square root of the sum, or
    # almost all for the last step, as with two bands.
    steps = np.arange(1, bands)
    root = np.cumprod((2 * steps - 3) / (2 * steps))
    starts = np.log(9 * root / root.sum()), np.where(steps == 1, 2.0, -9.0)
    found = min((_minimum(loss, x) for x in starts), key=lambda x: loss(x)[0])
    # Rounded down, so that the sum stays below 1.
    grid = 2.0**BandedInverse.LOG_GRID
    tail = np.floor(shares(found) * grid) / grid
    return BandedInverse((1.0, *(-tail).tolist()), iterations, steps_per_epoch)


def _minimum(
    loss: Callable[[np.ndarray], tuple[float, np.ndarray]],
    start: np.ndarray,
    bounds: Sequence[tuple[float, float]] | None = None,
) -> np.ndarray:
    """The argument with the least loss."""
    options = {"maxiter": 1000, "ftol": 1e-13}
    found: Any = optimize.minimize(
        loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options
    )
    return found.x


def _checked_sizes(iterations: Any, bands: Any, fewest: int) -> tuple[int, int]:
    iterations = _validate.positive_integer(
        iterations=iterations, fix="Use the number of updates."
    )
    return iterations, _validate.integer_in(
        range(fewest, iterations + 1),
        f"bands must be from {fewest} to iterations = {iterations}. Use "
        f"{min(8, iterations)}, for example.",
        bands=bands,
    )


def _correlation(x: np.ndarray, y: np.ndarray, bands: int) -> np.ndarray:
    """The inner products of x with y, delayed by up to as many steps as bands."""
    return np.array([x[k:] @ y[: len(y) - k] for k in range(bands)])
