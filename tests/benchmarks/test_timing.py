import numpy as np
import pytest

from benchmarks.timing import advantage

RNG = np.random.default_rng(0)


def times(mean):
    return RNG.normal(mean, 1.0, size=20_000)


@pytest.mark.parametrize("shift", [1.0, -1.0])
def test_advantage_is_that_of_the_best_threshold(shift):
    found, error = advantage(times(10.0), times(10.0 + shift))
    exact = 0.3829  # P[-1/2 < z < 1/2] for a standard normal z
    assert found == pytest.approx(exact, abs=0.025)
    assert error == pytest.approx(0.0065, rel=0.05)


def test_equal_times_have_no_advantage():
    found, error = zip(
        *(advantage(times(10.0), times(10.0)) for _ in range(20)), strict=True
    )
    assert abs(np.mean(found)) < 4 * np.mean(error) / 20**0.5
    assert min(found) < 0  # the threshold is tested on other rounds
