import functools
import math
from fractions import Fraction
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld, rdp
from scipy import optimize, stats

from dpmp import accounting
from dpmp.accounting import _epsilon, _events

ADD_OR_REMOVE, REPLACE, REPLACE_SPECIAL = (
    dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    dp_accounting.NeighboringRelation.REPLACE_ONE,
    dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
)
PLD, RDP = "privacy loss distributions", "Renyi differential privacy"
CHARGED = ", with truncation charged to delta"


def epsilon_of(event, delta, relation=ADD_OR_REMOVE):
    return accounting.get_epsilon(
        event, delta=delta, neighboring_relation=relation
    ).epsilon


def run(noise_multiplier, iterations, sampling_prob):
    return accounting.dpsgd_event(
        noise_multiplier, iterations, sampling_prob=sampling_prob
    )


def truncated_run(noise_multiplier, iterations, sampling_prob, num_examples, size):
    return accounting.truncated_dpsgd_event(
        noise_multiplier,
        iterations,
        sampling_prob=sampling_prob,
        num_examples=num_examples,
        truncated_batch_size=size,
    )


def run_epsilon(noise_multiplier, iterations, sampling_prob, delta):
    return epsilon_of(run(noise_multiplier, iterations, sampling_prob), delta)


def gaussian_delta(epsilon, stddev):
    """Of the Gaussian mechanism: Balle and Wang 2018, theorem 8, sensitivity 1."""
    log_first = stats.norm.logcdf(1 / (2 * stddev) - epsilon * stddev)
    log_second = epsilon + stats.norm.logcdf(-1 / (2 * stddev) - epsilon * stddev)
    return math.exp(log_first) * -math.expm1(log_second - log_first)


def sampled_gaussian_epsilon(noise_multiplier, sampling_prob, delta) -> Any:
    """Of one step, exactly, for removal, which costs more than addition.

    The mixture and the unit normal cross where 1 - q + q exp((2x - 1) / (2 s^2)) is
    exp(epsilon); delta is what the first has above that point more than exp(epsilon)
    times the second.
    """
    q, s = sampling_prob, noise_multiplier

    def excess(epsilon):
        log_ratio = epsilon + math.log1p(-(1 - q) * math.exp(-epsilon)) - math.log(q)
        x = s**2 * log_ratio + 0.5
        mixture = (1 - q) * stats.norm.sf(x / s) + q * stats.norm.sf((x - 1) / s)
        return mixture - math.exp(epsilon + stats.norm.logsf(x / s)) - delta

    return optimize.brentq(excess, 1e-9, 5000)


def test_events_are_compositions_of_sampled_or_truncated_gaussians():
    gaussian = dp_accounting.GaussianDpEvent(1.5)
    sampled = dp_accounting.PoissonSampledDpEvent(0.01, gaussian)
    truncated = dp_accounting.TruncatedSubsampledGaussianDpEvent(900, 0.01, 20, 1.5)
    composed = dp_accounting.SelfComposedDpEvent
    assert run(1.5, np.int64(7), 0.01) == composed(sampled, 7)
    assert truncated_run(1.5, 7, 0.01, 900, 20) == composed(truncated, 7)


@pytest.mark.parametrize(
    ("event", "epsilon", "accountant"),
    [
        (run(0.0, 10, 0.1), math.inf, "no noise, no privacy"),
        (dp_accounting.GaussianDpEvent(0.0), math.inf, "no noise, no privacy"),
        (run(0.0, 0, 0.1), 0, "nothing is released"),
        (run(1.0, 0, 0.1), 0, "nothing is released"),
    ],
    ids=str,
)
def test_without_noise_or_steps_nothing_is_computed(event, epsilon, accountant):
    guarantee = accounting.get_epsilon(event, delta=1e-5)
    assert (guarantee.epsilon, guarantee.accountant) == (epsilon, accountant)


def test_the_probability_of_truncation_is_the_binomial_tail():
    n, q, size = 30, Fraction(1, 8), 9
    tail = sum(
        math.comb(n, k) * q**k * (1 - q) ** (n - k) for k in range(size + 1, n + 1)
    )
    found = accounting.truncation_probability(n, float(q), size)
    assert found == pytest.approx(float(tail), rel=1e-13)
    # Far out: all 1000 of 1000 examples.
    found = accounting.truncation_probability(1000, 0.5, 999)
    assert found == pytest.approx(2.0**-1000, rel=1e-11)
    assert accounting.truncation_probability(1000, 0.5, 1000) == 0


@pytest.mark.parametrize("num_examples", [1, 7, 60_000, 10**9])
@pytest.mark.parametrize("sampling_prob", [1e-5, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("multiple_of", [1, 64])
def test_chosen_size_is_the_smallest_rarely_exceeded(
    num_examples, sampling_prob, multiple_of
):
    size = accounting.choose_truncated_batch_size(
        num_examples, sampling_prob, multiple_of=multiple_of
    )
    tail = functools.partial(
        accounting.truncation_probability, num_examples, sampling_prob
    )
    assert size % multiple_of == 0
    assert size < num_examples + multiple_of
    assert tail(size) <= 1e-20
    assert size == multiple_of or tail(size - multiple_of) > 1e-20


def test_agrees_with_dp_accounting_on_a_fine_grid():
    # dp_accounting 0.6 at intervals 1e-4, 5e-5 and 3e-5: 2.1245225, 2.1245170 and
    # 2.1245158, an error that falls with the square, to 2.1245151.
    event = run(1.0, 1000, 0.01)
    guarantee = accounting.get_epsilon(event, delta=1e-6)
    assert 2.1245151 <= guarantee.epsilon < 2.1245151 * (1 + 3e-5)
    assert guarantee.accountant == PLD
    assert guarantee.delta == 1e-6
    assert guarantee.neighboring_relation == "REPLACE_SPECIAL"


@pytest.mark.parametrize(
    ("sampling_prob", "noise_multiplier", "relation"),
    [
        (0.05, 2.0, ADD_OR_REMOVE),
        (0.05, 0.7, REPLACE),
        pytest.param(5e-3, 0.7, ADD_OR_REMOVE, marks=pytest.mark.slow),
    ],
)
def test_grid_is_fine_enough(sampling_prob, noise_multiplier, relation):
    event = run(noise_multiplier, 500, sampling_prob)
    interval = _epsilon._grid(_epsilon.Run(_events.steps_of(event), relation))[0]
    fine = pld.PLDAccountant(relation, interval / 2).compose(event)
    expected = fine.get_epsilon(1e-6)
    found = epsilon_of(event, 1e-6, relation)
    assert expected * (1 - 1e-6) <= found <= expected * (1 + 1e-4)


@pytest.mark.parametrize(
    ("noise_multiplier", "sampling_prob", "delta", "interval"),
    [
        *((1.0, 0.1, 1e-5, 0), (0.3, 1e-3, 1e-5, 0)),
        *((5.0, 0.9, 1e-4, 0), (0.5, 0.01, 1e-9, 0)),
        # Epsilon is 720 and 1450, where the sums of dp_accounting underflow. For the
        # first, it divides by a subnormal number and finds it infinite.
        *((0.0297, 0.5, 1e-6, 5), (0.02, 0.5, 1e-6, 5)),
    ],
)
def test_one_sampled_step_is_exact(noise_multiplier, sampling_prob, delta, interval):
    expected = sampled_gaussian_epsilon(noise_multiplier, sampling_prob, delta)
    found = run_epsilon(noise_multiplier, 1, sampling_prob, delta)
    assert expected <= found <= expected + (interval or 1e-4 * expected)


@pytest.mark.parametrize("mu", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("delta", [1e-15, 1e-6, 1e-3])
@pytest.mark.parametrize("iterations", [1, 10**6])
def test_without_sampling_is_the_gaussian_mechanism(mu, delta, iterations):
    event = accounting.dpsgd_event(
        math.sqrt(iterations) / mu, iterations, sampling_prob=1.0
    )
    guarantee = accounting.get_epsilon(event, delta=delta)
    assert guarantee.accountant == "exact Gaussian mechanism"
    attained = gaussian_delta(guarantee.epsilon, 1 / mu)
    assert attained <= delta
    assert attained == pytest.approx(delta, rel=1e-4)


def test_rounding_errors_of_the_transform_are_paid_for():
    # Sampling all but 1e-16 is no sampling, but goes through the grid, where
    # rounding makes delta too small by 1e-13 or so.
    event = run(100.0, 10**4, 1 - 1e-16)
    exact = dp_accounting.get_epsilon_gaussian(1.0, 1e-10)
    raw = pld.PLDAccountant(value_discretization_interval=1.25e-4).compose(event)
    assert raw.get_epsilon(1e-10) < exact
    assert exact < epsilon_of(event, 1e-10) < exact * 1.01


def test_replacing_costs_twice_the_contribution():
    # The noise multiplier is the standard deviation over the contribution, so that
    # replacing is as adding or removing with half of it where nothing is sampled.
    event = run(2.0, 10, 1.0)
    halved = run(1.0, 10, 1.0)
    found = epsilon_of(event, 1e-6, REPLACE)
    assert found == pytest.approx(epsilon_of(halved, 1e-6), rel=1e-9)
    by_pld = pld.PLDAccountant(REPLACE, 1e-3).compose(event).get_epsilon(1e-6)
    assert found == pytest.approx(by_pld, rel=1e-4)
    sampled = run(2.0, 10, 0.1)
    assert epsilon_of(sampled, 1e-6, REPLACE) > epsilon_of(sampled, 1e-6)


def test_composition_of_different_steps():
    parts = [
        run(1.0, 100, 0.01),
        dp_accounting.GaussianDpEvent(5.0),
        dp_accounting.NoOpDpEvent(),
    ]
    event = dp_accounting.ComposedDpEvent(parts)
    found = epsilon_of(event, 1e-6)
    by_pld = pld.PLDAccountant(value_discretization_interval=1e-3).compose(event)
    assert found == pytest.approx(by_pld.get_epsilon(1e-6), rel=1e-3)
    assert found > max(epsilon_of(part, 1e-6) for part in parts)
    nested = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(9.0), 3)
    nested = dp_accounting.SelfComposedDpEvent(nested, 3)
    expected = dp_accounting.get_epsilon_gaussian(3.0, 1e-6)
    assert epsilon_of(nested, 1e-6) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("noise_multiplier", [1e-3, 1e4])
@pytest.mark.parametrize(
    ("iterations", "sampling_prob", "delta"),
    [(1, 1e-5, 1e-15), (10**6, 1e-5, 0.1), (1, 0.7, 0.1), (10**6, 0.7, 1e-15)],
)
def test_extremes_have_an_answer(noise_multiplier, iterations, sampling_prob, delta):
    found = run_epsilon(noise_multiplier, iterations, sampling_prob, delta)
    unsampled = run(noise_multiplier, iterations, 1)
    # Sampling never costs privacy; RDP loses a factor of two at the most, and
    # stops at a few hundredths.
    assert 0 <= found <= 2.1 * epsilon_of(unsampled, delta) + 0.05


@pytest.mark.parametrize("delta", [1e-13, 3e-12])
def test_delta_below_the_rounding_errors_is_left_to_rdp(delta):
    event = run(1.0, 1000, 0.01)
    guarantee = accounting.get_epsilon(event, delta=delta)
    assert guarantee.accountant == RDP
    by_rdp = rdp.RdpAccountant().compose(event).get_epsilon(delta)
    assert by_rdp <= guarantee.epsilon * (1 + 1e-9)
    assert guarantee.epsilon < by_rdp * 1.01


@pytest.mark.parametrize(
    ("event", "relation", "delta"),
    [
        (run(1.0, 100, 0.01), REPLACE, 1e-14),
        (run(1e-3, 100, 0.01), REPLACE, 1e-5),
        (run(1e-155, 100, 0.01), ADD_OR_REMOVE, 1e-5),
        (run(1e-200, 100, 0.01), ADD_OR_REMOVE, 1e-5),
        # Truncation happens too often, for RDP and for the price in delta.
        (truncated_run(1.0, 1000, 0.01, 6000, 90), REPLACE_SPECIAL, 1e-13),
        (truncated_run(0.02, 10, 0.01, 6000, 546), REPLACE_SPECIAL, 1e-6),
    ],
    ids=["delta", "noise", "overflow", "underflow", "truncation", "little noise"],
)
def test_error_where_no_accountant_has_an_answer(event, relation, delta):
    message = r"noise and delta must be large enough.*Larger truncated batches help"
    with pytest.raises(ValueError, match=message):
        epsilon_of(event, delta, relation)


@pytest.mark.parametrize("relation", [REPLACE, REPLACE_SPECIAL])
def test_at_the_chosen_size_truncation_is_free(relation):
    size = accounting.choose_truncated_batch_size(60_000, 0.01)
    truncated = truncated_run(1.0, 1000, 0.01, 60_000, size)
    plain = run(1.0, 1000, 0.01)
    found = accounting.get_epsilon(truncated, delta=1e-6, neighboring_relation=relation)
    assert found.accountant == PLD + CHARGED
    expected = epsilon_of(plain, 1e-6, relation)
    assert expected < found.epsilon < expected * (1 + 2e-5)


def test_frequent_truncation_agrees_with_dp_accounting():
    event = truncated_run(1.0, 100, 0.05, 1000, 55)
    guarantee = accounting.get_epsilon(event, delta=1e-6)
    assert guarantee.accountant == PLD
    expected = pld.PLDAccountant(value_discretization_interval=1e-3).compose(event)
    assert guarantee.epsilon == pytest.approx(expected.get_epsilon(1e-6), rel=1e-3)


def test_no_truncation_where_all_examples_fit():
    event = truncated_run(1.0, 100, 0.05, 50, 50)
    assert epsilon_of(event, 1e-6) == run_epsilon(1.0, 100, 0.05, 1e-6)


@pytest.mark.parametrize(
    ("size", "delta", "share"), [(160, 1e-13, 1e-4), (139, 1e-14, 0.5)]
)
def test_a_share_of_delta_is_spent_on_truncation(size, delta, share):
    """RDP, since delta is below the rounding errors of PLD.

    With 139 examples, the limit is exceeded with probability 6e-19 in a step, which is
    too often for a small share of delta.
    """
    event = truncated_run(4.0, 1000, 0.01, 6000, size)
    guarantee = accounting.get_epsilon(event, delta=delta)
    assert guarantee.accountant == RDP + CHARGED
    plain = run_epsilon(4.0, 1000, 0.01, (1 - share) * delta)
    assert guarantee.epsilon == pytest.approx(plain, rel=1e-6)


def test_charging_truncation_is_no_cheaper_than_analysing_it():
    step = truncated_run(2.0, 1, 0.1, 50, 20)
    steps = _epsilon.Run(_events.steps_of(step, 10), ADD_OR_REMOVE)
    assert 1e-9 < steps.steps[0].truncation < 1e-7
    for delta in (1e-4, 1e-5):
        charged, _ = _epsilon._untruncated_bound(steps, delta, share=0.5)
        analysed, _ = _epsilon._pld_bound(steps, delta)
        assert analysed < charged < math.inf


def test_truncation_that_underflows_is_not_an_error():
    # dp_accounting divides one underflowing tail by another here, and refuses the
    # sampling probability of zero that it finds.
    event = truncated_run(1.0, 10, 0.01, 6000, 546)
    expected = run_epsilon(1.0, 10, 0.01, 1e-6)
    assert epsilon_of(event, 1e-6) == pytest.approx(expected, rel=2e-5)


def test_the_price_of_truncation_grows_with_epsilon():
    # Some batch is truncated with a probability of 5e-12. Next to delta that is
    # little, but exp(8.7) times as much is not.
    event = truncated_run(0.6, 1000, 0.01, 6000, 128)
    guarantee = accounting.get_epsilon(event, delta=1e-6)
    assert guarantee.accountant == PLD
    assert guarantee.epsilon > 8


def calibrated(
    make_event, iterations, epsilon, delta=1e-6, relation=ADD_OR_REMOVE, **options
):
    make_event = functools.partial(make_event, iterations=iterations, **options)
    found = accounting.calibrate_noise_multiplier(
        make_event, epsilon=epsilon, delta=delta, neighboring_relation=relation
    )
    return found, make_event


SIZES = {"num_examples": 1000, "truncated_batch_size": 240}


@pytest.mark.parametrize(
    ("make_event", "epsilon", "relation", "options"),
    [
        (accounting.dpsgd_event, 0.5, ADD_OR_REMOVE, {"sampling_prob": 0.03}),
        (accounting.dpsgd_event, 8.0, ADD_OR_REMOVE, {"sampling_prob": 0.2}),
        (accounting.dpsgd_event, 0.5, REPLACE, {"sampling_prob": 0.2}),
        (
            accounting.truncated_dpsgd_event,
            2.0,
            ADD_OR_REMOVE,
            {"sampling_prob": 0.2} | SIZES,
        ),
    ],
    ids=["small", "large", "replace", "truncated"],
)
def test_the_smallest_noise_that_meets_the_target(
    make_event, epsilon, relation, options
):
    found, make_event = calibrated(
        make_event, 100, epsilon, relation=relation, **options
    )
    assert epsilon_of(make_event(found), 1e-6, relation) <= epsilon
    less = make_event(found * (1 - 1e-4))
    assert epsilon_of(less, 1e-6, relation) > epsilon


@pytest.mark.parametrize("epsilon", [0.001, 3.0, 1000.0])
@pytest.mark.parametrize("delta", [1e-15, 0.1])
def test_inverse_of_the_exact_gaussian(epsilon, delta):
    found, _ = calibrated(accounting.dpsgd_event, 25, epsilon, delta, sampling_prob=1.0)
    exact = 5 * dp_accounting.get_sigma_gaussian(epsilon, delta)
    assert exact <= found <= exact * (1 + 1e-4)


@pytest.mark.parametrize(
    ("epsilon", "iterations", "sampling_prob"),
    [
        (0.001, 1000, 0.05),
        (1000.0, 1, 0.5),
        pytest.param(0.001, 10**5, 3e-3, marks=pytest.mark.slow),
    ],
)
def test_extreme_targets(epsilon, iterations, sampling_prob):
    found, make_event = calibrated(
        accounting.dpsgd_event, iterations, epsilon, sampling_prob=sampling_prob
    )
    assert 0.5 * epsilon < epsilon_of(make_event(found), 1e-6) <= epsilon
