import itertools
from fractions import Fraction

import numpy as np
import pytest
from scipy import linalg, optimize

from dpmp.strategies import (
    BandedInverse,
    BandedToeplitz,
    banded_inverse,
    banded_toeplitz,
)


def matrices(strategy, momentum=0.0):
    """C, and the sums of all updates, as matrices of one row for each step."""
    steps = strategy.iterations
    column = np.zeros(steps)
    column[: strategy.bands] = strategy.coefficients[:steps]
    if isinstance(strategy, BandedInverse):
        column = np.linalg.inv(linalg.toeplitz(column, np.zeros(steps)))[:, 0]
    sums = np.tri(steps) @ linalg.toeplitz(
        momentum ** np.arange(steps), np.zeros(steps)
    )
    return linalg.toeplitz(column, np.zeros(steps)), sums


@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("coefficients", [(1.0,), (1.0, 0.5), (1.0, -0.25, 0.5, 0.125)])
def test_errors_are_those_of_matrices(coefficients, momentum):
    strategy = BandedToeplitz(coefficients, 20)
    matrix, sums = matrices(strategy, momentum)
    inverse = np.linalg.inv(matrix)
    mean_square = np.sum((sums @ inverse) ** 2) / 20
    norm = np.linalg.norm(matrix, axis=0).max()
    expected = np.sqrt(mean_square) * norm
    assert strategy.error(momentum=momentum) == pytest.approx(expected)
    at_end = np.linalg.norm((sums @ inverse)[-1]) * norm
    assert strategy.error(momentum=momentum, at_end=True) == pytest.approx(at_end)
    assert strategy.noise_gain == pytest.approx(np.linalg.norm(inverse[-1]))
    assert strategy.sensitivity == pytest.approx(norm)


@pytest.mark.parametrize("steps_per_epoch", [1, 4, 7, 20, 30])
@pytest.mark.parametrize("coefficients", [(1.0, -0.25), (1.0, -0.5, 0.0, -0.375)])
def test_errors_of_inverses_are_those_of_matrices(coefficients, steps_per_epoch):
    strategy = BandedInverse(coefficients, 20, steps_per_epoch)
    matrix, sums = matrices(strategy)
    inverse = np.linalg.inv(matrix)
    x = np.random.default_rng(0).normal(size=(20, 3))
    np.testing.assert_allclose(strategy.product(x), matrix @ x)
    np.testing.assert_allclose(strategy.quotient(x), inverse @ x)
    # After any number of steps, for an example of any group, with contributions that
    # have any signs, the square is at most that of as many epochs.
    largest = 0.0
    for steps, group in itertools.product(range(1, 21), range(steps_per_epoch)):
        epochs = -(-steps // steps_per_epoch)
        columns = matrix[:steps, group:steps:steps_per_epoch]
        for signs in ([1] * 20, [1, -1] * 10):
            change = columns @ signs[: columns.shape[1]]
            largest = max(largest, np.sum(change**2) / epochs)
    assert strategy.sensitivity == pytest.approx(np.sqrt(largest), rel=1e-12)
    expected = np.sqrt(np.mean(np.sum((sums @ inverse) ** 2, axis=1)))
    assert strategy.error() == pytest.approx(expected * np.sqrt(largest))
    assert strategy.noise_gain == pytest.approx(np.linalg.norm(inverse[-1]))
    assert strategy.cycle_length == steps_per_epoch


@pytest.mark.parametrize(
    ("bands", "error"), [(1, 11.336), (2, 8.146), (4, 5.978), (8, 4.548), (16, 3.638)]
)
def test_errors_are_the_published_ones(bands, error):
    strategy = banded_toeplitz(bands, iterations=256)
    assert strategy.bands == bands
    assert strategy.error() == pytest.approx(error, rel=2e-4)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_no_other_coefficients_have_less_error(momentum):
    found = banded_toeplitz(4, iterations=50, momentum=momentum)

    def error(tail):
        other = object.__new__(BandedToeplitz)  # without rounding
        object.__setattr__(other, "coefficients", (1.0, *tail))
        object.__setattr__(other, "iterations", 50)
        return other.error(momentum=momentum)

    best = optimize.minimize(error, found.coefficients[1:], method="Nelder-Mead").fun
    assert best <= found.error(momentum=momentum) < 1.0005 * best


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_no_other_inverse_has_less_error(epochs, momentum):
    steps, of_epoch = 60, 60 // epochs
    found = banded_inverse(
        4, iterations=steps, steps_per_epoch=of_epoch, momentum=momentum
    )
    turns = np.zeros(steps)
    turns[::of_epoch] = 1
    _, sums = matrices(BandedToeplitz((1.0,), steps), momentum)

    def error(tail):
        inverse = linalg.toeplitz(
            np.concatenate([[1.0], tail, np.zeros(steps - 4)]), np.zeros(steps)
        )
        change = np.linalg.solve(inverse, turns)
        return np.linalg.norm(sums @ inverse) * np.linalg.norm(change)

    tail = found.coefficients[1:]
    options = {"method": "Nelder-Mead", "bounds": [(-1, 0)] * 3}
    best = optimize.minimize(error, tail, **options).fun
    assert best <= error(tail) < 1.001 * best
    expected = error(tail) / np.sqrt(steps * epochs)
    assert found.error(momentum=momentum) == pytest.approx(expected)


@pytest.mark.parametrize("bands", [4, 16])
def test_inverses_have_less_error_than_published_coefficients(bands):
    """Those of Kalinin et al. 2025: the first ones of the root of the inverse sum."""
    steps = np.arange(1, bands)
    root = np.cumprod((2 * steps - 3) / (2 * steps))
    published = BandedInverse((1.0, *root), 500, 500)
    found = banded_inverse(bands, iterations=500, steps_per_epoch=500)
    assert found.error() < {4: 0.54, 16: 0.79}[bands] * published.error()


def test_more_bands_have_no_more_error():
    """Also where the best inverse almost has two bands."""
    options = {"iterations": 2000, "steps_per_epoch": 1000, "momentum": 0.99}
    errors = [banded_inverse(x, **options).error(momentum=0.99) for x in (2, 8)]
    assert errors[1] < 1.001 * errors[0]


def test_momentum_wants_other_coefficients():
    plain, heavy = (banded_toeplitz(8, iterations=200, momentum=x) for x in (0, 0.9))
    assert heavy.error(momentum=0.9) < 0.99 * plain.error(momentum=0.9)
    assert plain.error() < 0.99 * heavy.error()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_decaying_learning_rate_wants_the_same_coefficients(momentum):
    """The guide says so: to within 0.5 % of the error."""
    steps, bands = 80, 6
    strategy = banded_toeplitz(bands, iterations=steps, momentum=momentum)
    rates = 0.5 + 0.5 * np.cos(np.pi * np.arange(steps) / steps)
    _, updates = matrices(BandedToeplitz((1.0,), steps), momentum)
    updates = np.tri(steps) @ np.diag(rates) @ np.diff(updates, axis=0, prepend=0)

    def error(tail):
        column = np.concatenate([[1.0], tail, np.zeros(steps - bands)])
        inverse = linalg.inv(linalg.toeplitz(column, np.zeros(steps)))
        return np.linalg.norm(updates @ inverse) * np.linalg.norm(column)

    found = strategy.coefficients[1:]
    best = optimize.minimize(error, found, options={"maxiter": 30}).fun
    assert best <= error(found) < 1.005 * best


def test_the_sensitivity_is_rounded_up():
    for bands in range(1, 40):
        strategy = banded_toeplitz(bands, iterations=100)
        square = sum(Fraction(x) ** 2 for x in strategy.coefficients)
        assert square <= Fraction(strategy.sensitivity) ** 2 < square * (1 + 2**-50)


def test_coefficients_are_rounded_to_the_grid():
    strategy = BandedToeplitz((1, 0.3, np.float32(-0.1)), 10)
    assert strategy.coefficients == (1.0, 19 / 64, -6 / 64)
    assert strategy.numerators == (64, 19, -6)
    assert hash(strategy) == hash(BandedToeplitz((1.0, 0.297, -0.1), 10))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: BandedToeplitz((), 10), "coefficients must begin with 1"),
        (lambda: BandedToeplitz((0.5, 0.5), 10), "coefficients must begin with 1"),
        (lambda: BandedToeplitz((1.0, 2.0), 10), "from -1 to 1"),
        (lambda: BandedToeplitz((1.0, float("nan")), 10), "from -1 to 1"),
        (lambda: BandedToeplitz((1.0, 0.5), 0), "iterations must be"),
        (lambda: BandedToeplitz((1.0, 1.0), 10**4), "let noise die out"),
        (lambda: BandedInverse((1.0, None), 10, 5), "from -1 to 1"),
        (lambda: BandedInverse((1.0,), 10, 5), "must not be positive"),
        (lambda: BandedInverse((1.0, 0.5), 10, 5), "must not be positive"),
        (lambda: BandedInverse((1.0, -0.7, -0.4), 10, 5), "a sum of at least 0"),
        (lambda: BandedInverse((1.0, -0.7), 10, 0), "steps_per_epoch must be"),
        (
            lambda: banded_inverse(1, iterations=9, steps_per_epoch=3),
            "bands must be from 2",
        ),
        (
            lambda: banded_inverse(2, iterations=9, steps_per_epoch=0.5),
            "steps_per_epoch must be",
        ),
        (lambda: banded_toeplitz(0, iterations=10), "bands must be from 1 to"),
        (lambda: banded_toeplitz(11, iterations=10), "bands must be from 1 to"),
        (lambda: banded_toeplitz(2, iterations=10, momentum=1.0), "momentum must be"),
    ],
)
def test_what_is_no_strategy_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
