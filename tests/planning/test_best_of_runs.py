import collections
import dataclasses
import math
import pathlib
import re

import dp_accounting
import numpy as np
import pytest
from scipy import optimize, stats

from dpmp import DPSGD, strategies
from dpmp.accounting import DEFAULT_RELATION, dpsgd_event
from dpmp.planning import BestOfRuns

DOCS = pathlib.Path(__file__).parents[2] / "docs"

# One step without sampling is a Gaussian mechanism, whose exact results are known.
ONE_STEP = DPSGD(
    num_examples=100,
    expected_batch_size=100,
    iterations=1,
    l2_clip_norm=1.0,
    noise_multiplier=1.0,
    delta=1e-6,
)
RUN = DPSGD(
    num_examples=6000,
    expected_batch_size=60,
    iterations=100,
    l2_clip_norm=1.0,
    noise_multiplier=0.7,
    delta=1e-6,
)


def best_of(mechanism, expected_runs=5):
    return BestOfRuns(mechanism=mechanism, expected_runs=expected_runs)


def true_epsilon(noise, expected_runs, delta, cut):
    """Epsilon of the best of several noisy numbers, by an order that tells a lot.

    Numbers below the cut are the best ones, and then the larger ones. If there is a
    number below the cut, it hides large numbers. There is one less often if the mean is
    1 instead of 0.
    """
    x = np.linspace(-9 * noise, 9 * noise + 1, 10_001)

    def density(mean):
        below = stats.norm.cdf(np.minimum(x, cut), mean, noise)
        better = below + np.where(x < cut, 0, stats.norm.sf(x, mean, noise))
        stop = 1 / expected_runs
        better_or_end = stop + (1 - stop) * better
        return stats.norm.pdf(x, mean, noise) * stop / better_or_end**2

    def excess(epsilon):
        larger = density(1.0) - math.exp(epsilon) * density(0.0)
        return np.maximum(larger, 0).sum() * (x[1] - x[0]) - delta

    return optimize.brentq(excess, 0, 50)


@pytest.mark.parametrize(("noise", "expected_runs"), [(1.0, 20), (4.0, 2)])
def test_epsilon_is_hardly_above_that_of_the_worst_order(noise, expected_runs):
    mechanism = dataclasses.replace(ONE_STEP, noise_multiplier=noise)
    claimed = best_of(mechanism, expected_runs).guarantee().epsilon
    cuts = 0.5 - noise * np.array([0.5, 1.0, 1.5])
    true = max(true_epsilon(noise, expected_runs, 1e-6, cut) for cut in cuts)
    assert true < claimed < 1.1 * true


def test_epsilon_is_that_of_the_formula():
    def delta_of(epsilon):  # of the Gaussian mechanism (Balle and Wang 2018)
        low, high = stats.norm.cdf([-epsilon - 0.5, -epsilon + 0.5])
        return high - math.exp(epsilon) * low

    def solve(excess):
        return optimize.brentq(excess, 1e-9, 30)

    of_run = solve(lambda x: delta_of(x) - 1e-6 / 5)
    of_rank = solve(lambda x: 4 * delta_of(x) - math.expm1(x))
    guarantee = best_of(ONE_STEP).guarantee()
    assert guarantee.epsilon == pytest.approx(of_run + 2 * of_rank, rel=1e-4)
    assert guarantee.delta == 1e-6


def renyi_epsilon(mechanism):
    """Papernot and Steinke 2022, theorem 2, by dp_accounting."""
    accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=DEFAULT_RELATION)
    event = dpsgd_event(
        mechanism.noise_multiplier,
        mechanism.iterations,
        sampling_prob=mechanism.sampling_prob,
    )
    # The shape is that of a geometric number.
    accountant.compose(dp_accounting.dp_event.RepeatAndSelectDpEvent(event, 5, 1))
    return accountant.get_epsilon(mechanism.delta)


def epsilon_with(plan, noise):
    """Epsilon at a delta of 1e-6 of runs with a noise multiplier."""
    changed = {"noise_multiplier": noise, "delta": 1e-6}
    if isinstance(plan, BestOfRuns):
        changed = {"mechanism": dataclasses.replace(plan.mechanism, **changed)}
    return dataclasses.replace(plan, **changed).guarantee().epsilon


@pytest.mark.slow
def test_figures_of_the_guides():
    plan = DPSGD(
        num_examples=60_000,
        expected_batch_size=2048,
        iterations=293,
        l2_clip_norm=1.0,
    )
    settings = " ".join((DOCS / "settings.md").read_text().split())
    few, many = (1 - 0.9 / m / (1 - (1 - 1 / m) * 0.9) for m in (5, 10))
    assert f"{few:.0%}, and with 10 runs {many:.0%}".replace("%", " %") in settings
    table = re.findall(r"\*\* \| (\d\.\d\d) \| (\d\.\d\d) \|", settings)
    for runs, best, together in zip((5, 10), *table, strict=True):
        all_runs = dataclasses.replace(plan, iterations=293 * runs)
        for search, printed in ((best_of(plan, runs), best), (all_runs, together)):
            noises = float(printed) - 0.005, float(printed) + 0.005
            more, less = (epsilon_with(search, x) for x in noises)
            assert less <= 3 <= more

    run = dataclasses.replace(
        RUN, num_examples=60_000, expected_batch_size=256, iterations=2340
    )
    proofs = (DOCS / "proofs.md").read_text()
    of_search = best_of(run).guarantee().epsilon
    for epsilon in (run.guarantee().epsilon, of_search, renyi_epsilon(run)):
        assert f"{epsilon:.2f}" in proofs


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": "random_allocation"},
        {"strategy": strategies.banded_toeplitz(4, iterations=100)},
        {"neighboring_relation": dp_accounting.NeighboringRelation.REPLACE_ONE},
    ],
    ids=str,
)
def test_every_way_to_draw_batches_and_noise_has_an_epsilon(fields):
    mechanism = dataclasses.replace(RUN, **fields)
    of_run = mechanism.guarantee().epsilon
    assert of_run < best_of(mechanism).guarantee().epsilon < 2 * of_run
    of_no_privacy = best_of(mechanism.without_privacy()).guarantee()
    assert of_no_privacy.epsilon == math.inf


def test_calibration_meets_the_target():
    search = best_of(ONE_STEP).calibrate(epsilon=3.0, delta=1e-5)
    assert 2.99 < search.guarantee().epsilon <= 3.0
    assert search.mechanism.delta == 1e-5
    one_run = ONE_STEP.calibrate(epsilon=3.0, delta=1e-5)
    assert search.mechanism.noise_multiplier > one_run.noise_multiplier


def test_the_number_of_runs_is_geometric_and_settings_are_uniform():
    searches = [best_of(RUN, 2.5).draw(["a", "b", "c"]) for _ in range(20_000)]
    lengths = np.array([len(x) for x in searches])
    # Five standard deviations.
    assert np.mean(lengths) == pytest.approx(2.5, abs=0.07)
    assert np.mean(lengths == 1) == pytest.approx(0.4, abs=0.018)
    assert np.mean(lengths == 3) == pytest.approx(0.4 * 0.6**2, abs=0.013)
    for position in (0, 1):
        drawn = [x[position] for x in searches if len(x) > position]
        shares = collections.Counter(drawn)
        assert all(
            shares[x] / len(drawn) == pytest.approx(1 / 3, abs=0.022) for x in "abc"
        )


def test_wrong_searches_are_refused():
    with pytest.raises(ValueError, match="mechanism must be a DPSGD"):
        BestOfRuns(mechanism=1.0, expected_runs=5)
    with pytest.raises(ValueError, match="expected_runs must be above 1"):
        best_of(RUN, 1)
    with pytest.raises(ValueError, match="candidates must be a list"):
        best_of(RUN).draw([])
    with pytest.raises(ValueError, match="delta"):
        best_of(dataclasses.replace(RUN, delta=None)).guarantee()
