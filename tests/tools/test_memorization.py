"""Bounds from losses hold if epsilon is known, and are close to it."""

import dataclasses

import numpy as np
import pytest
from refusals import refusals

from dpmp.tools import audit, checks
from dpmp.tools.audit import _memorization


def coins_and_losses(size, epsilon, seed):
    """Losses that tell coins by randomised response, and nothing else."""
    rng = np.random.default_rng(seed)
    is_in = rng.random(size) < 0.5
    is_true = rng.random(size) < 1 / (1 + np.exp(-epsilon))
    return is_in, rng.random(size) - (is_in == is_true)


def test_losses_bound_epsilon_from_below():
    """With confidence 50 %, so that a bound that is too large is seen."""
    bounds = [
        audit.memorization(losses, is_in, delta=0, confidence=0.5).epsilon
        for is_in, losses in (coins_and_losses(256, 1.0, i) for i in range(100))
    ]
    assert 5 <= np.sum(np.greater(bounds, 1.0)) <= 50


@pytest.mark.parametrize("epsilon", [0.5, 4.0])
def test_the_bound_of_many_canaries_is_close_to_epsilon(epsilon):
    is_in, losses = coins_and_losses(8000, epsilon, 0)
    found = audit.memorization(losses, is_in, delta=1e-6, confidence=0.95)
    assert 0.8 * epsilon < found.epsilon < epsilon


def test_the_bound_is_the_one_of_jax_privacy():
    auditing = pytest.importorskip("jax_privacy.auditing")
    is_in, losses = coins_and_losses(400, 3.0, 0)
    right = np.sum(is_in[np.argsort(losses)[:100]])
    theirs = auditing.CanaryScoreAuditor(-losses[is_in], -losses[~is_in])
    threshold = auditing.Explicit(float(-np.sort(losses)[99]))
    expected = theirs.epsilon_one_run(0.05, 1e-3, threshold_strategy=threshold)
    found = _memorization._lower_bound(400, 100, right, delta=1e-3, level=0.05)
    assert found == pytest.approx(expected, abs=1e-5)
    assert found > 1


def test_delta_covers_a_model_that_publishes_everything():
    """Whoever does so with probability delta is private with epsilon 0."""
    is_in = coins_and_losses(64, 1.0, 0)[0]
    with_delta, without = (
        audit.memorization(-1.0 * is_in, is_in, delta=delta, confidence=0.999)
        for delta in (1 / 128, 0)
    )
    assert with_delta.epsilon == with_delta.largest_epsilon == 0
    assert without.epsilon > 1


def test_rates_and_exposure_are_as_defined():
    is_in, losses = coins_and_losses(500, 4.0, 0)
    found = audit.memorization(losses, is_in, delta=1e-5)
    others = np.sort(losses[~is_in])
    ranks = np.array([1 + np.sum(others < x) for x in losses[is_in]])
    exposures = np.log2(len(others) + 1) - np.log2(ranks)
    assert found.exposure == pytest.approx(np.median(exposures))
    assert found.largest_exposure == pytest.approx(max(exposures))
    rate = np.mean(losses[is_in] < others[len(others) // 100])
    assert found.true_positive_rate == pytest.approx(rate)


def test_the_order_of_canaries_tells_nothing():
    is_in = np.arange(400) < 200
    found = audit.memorization(np.zeros(400), is_in, delta=0, confidence=1 - 1e-6)
    assert found.epsilon == 0
    assert found.true_positive_rate < 0.5


def test_losses_are_compared_with_a_claim():
    is_in, losses = coins_and_losses(400, 4.0, 0)
    true, false, vague = (
        audit.memorization(losses, is_in, delta=1e-5, claimed=claimed)
        for claimed in (4.0, 1.0, 8.0)
    )
    assert (true.passed, false.passed, vague.passed) == (True, False, True)
    assert "The claim of 4.000 is not contradicted." in " ".join(str(true).split())
    assert "The claim of 1.000 is FALSE." in " ".join(str(false).split())
    assert "So few canaries prove 4.559 at most." in " ".join(str(vague).split())
    none = audit.memorization(losses, is_in, delta=1e-5)
    assert "likelihoods?" not in str(none)
    assert "likelihoods?" in str(audit.memorization(-losses, is_in, delta=1e-5))
    assert checks.as_json(dataclasses.asdict(none))["claimed"] == "inf"


@refusals(
    ("losses", [np.zeros(99), np.zeros((100, 1))], "a number for each canary"),
    ("losses", [np.full(100, np.nan), np.full(100, np.inf)], "must be finite"),
    ("is_in", [np.ones(100), np.arange(100) % 2], "and is_in a bool"),
    ("is_in", [np.arange(100) < 20, np.zeros(100, bool)], "must be fair coins"),
    ("delta", [0.01], r"at most 1 / \(2 \* canaries\)"),
    ("delta", [-1e-5, np.nan], "delta must be a finite number of at least 0"),
    ("claimed", [np.nan], "claimed must be a number"),
    ("confidence", [0, 1], r"confidence must be in \(0, 1\)"),
)
def test_arguments_of_memorization_are_checked(wrong, message):
    good = {"losses": np.zeros(100), "is_in": np.arange(100) < 50, "delta": 1e-5}
    with pytest.raises(ValueError, match=message):
        audit.memorization(**(good | wrong))
    with pytest.raises(ValueError, match="at least 32 canaries"):
        audit.memorization(np.zeros(31), np.arange(31) < 15, delta=0)
