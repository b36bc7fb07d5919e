import dataclasses
import math

import dp_accounting
import numpy as np
import pytest
from scipy import special, stats

from dpmp import accounting
from dpmp.accounting import _allocation
from dpmp.accounting._allocation import ROUNDING, epoch_loss_distribution
from dpmp.accounting._events import RandomAllocationDpEvent

Relation = dp_accounting.NeighboringRelation
WHOLE = 10**6  # a batch size that no batch exceeds


def epsilon_of(noise, steps, epochs, delta, relation=Relation.REPLACE_SPECIAL):
    event = accounting.random_allocation_event(
        noise,
        steps * epochs,
        steps_per_epoch=steps,
        num_examples=1000,
        truncated_batch_size=WHOLE,
    )
    return accounting.get_epsilon(
        event, delta=delta, neighboring_relation=relation
    ).epsilon


@pytest.mark.parametrize(
    ("noise", "steps", "epochs", "delta", "below", "above"),
    [
        # Bounds by gaussian_allocation_epsilon_range of PLD_accounting 2.0.
        (0.56, 15, 2, 1e-5, 8.038374, 8.090467),
        (0.635, 15, 2, 1e-5, 6.206049, 6.257546),
        (0.6, 48, 1, 1e-5, 4.137156, 4.159960),
        (0.7, 100, 5, 1e-6, 3.977871, 4.052785),
        (1.2, 10, 3, 1e-5, 2.356791, 2.433195),
    ],
)
def test_epsilon_is_between_the_bounds_of_others(
    noise, steps, epochs, delta, below, above
):
    assert below < epsilon_of(noise, steps, epochs, delta) < above


def test_an_epoch_of_one_step_is_a_gaussian_mechanism():
    gaussian = accounting.dpsgd_event(0.5, 3, sampling_prob=1.0)
    exact = accounting.get_epsilon(gaussian, delta=1e-5).epsilon
    assert epsilon_of(0.5, 1, 3, 1e-5) == exact
    losses = epoch_loss_distribution(0.5, 1, 0.01).self_compose(3)
    assert exact <= losses.get_epsilon_for_delta(1e-5) <= 1.001 * exact


@pytest.mark.parametrize(
    ("noise", "steps", "epochs", "delta", "share"),
    [
        (2.0, 1000, 2, 1e-5, 0.97),
        (0.6, 1000, 1, 1e-10, 0.97),
        pytest.param(0.6, 20_000, 1, 1e-10, 0.5, marks=pytest.mark.slow),
    ],
)
def test_many_steps_cost_little_less_than_with_poisson_sampling(
    noise, steps, epochs, delta, share
):
    poisson = accounting.dpsgd_event(noise, steps * epochs, sampling_prob=1 / steps)
    most = accounting.get_epsilon(poisson, delta=delta).epsilon
    assert share * most < epsilon_of(noise, steps, epochs, delta) < most


def deltas_of_two_steps(noise, epsilon):
    """Both deltas of an epoch of two steps, by an integral over one entry."""
    signal, z = 1 / noise, np.linspace(-12, 12 + 1 / noise, 200_001)
    first = np.exp(signal * z - signal**2 / 2)
    density = stats.norm.pdf(z) * (z[1] - z[0])

    def call(strike):
        """E[(V - strike)_+] of the lognormal second entry, by Black and Scholes."""
        safe = np.maximum(strike, 1e-300)
        d = -np.log(safe) / signal + signal / 2
        value = special.ndtr(d) - safe * special.ndtr(d - signal)
        return np.where(strike <= 0, 1 - strike, value)

    def put(strike):
        return np.where(strike <= 0, 0.0, call(strike) - 1 + strike)

    ahead = np.sum(density * call(2 * np.exp(epsilon) - first)) / 2
    strike = 2 * np.exp(-epsilon) - first
    return ahead, np.sum(density * put(strike)) * np.exp(epsilon) / 2


@pytest.mark.parametrize("noise", [0.4, 1.0, 3.0])
def test_deltas_of_two_steps_are_exact_in_both_directions(noise):
    losses = epoch_loss_distribution(noise, 2, 1 / noise / 80)
    for epsilon in (0.0, 0.3 / noise, 2 / noise):
        computed = [
            pmf.get_delta_for_epsilon(epsilon)
            for pmf in (losses._pmf_remove, losses._pmf_add)
        ]
        for bound, exact in zip(
            computed, deltas_of_two_steps(noise, epsilon), strict=True
        ):
            assert exact * (1 - 1e-9) - ROUNDING <= bound <= 1.001 * exact


@pytest.mark.parametrize(
    "steps", [1, 2, 7, 100, pytest.param(1023, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("noise", [0.3, 1.0, 3.0])
def test_ratios_have_mass_and_mean_one(monkeypatch, noise, steps):
    monkeypatch.setattr(_allocation._Ratio, "losses", property(lambda ratio: ratio))
    interval = 1 / noise / 80 / steps**0.5
    ratio = epoch_loss_distribution.__wrapped__(noise, steps, interval)
    mass = math.fsum(ratio.masses) + ratio.mass_at_zero
    mean = math.fsum(ratio.means) + ratio.mean_at_infinity
    assert abs(mass - 1) < ROUNDING / 4 > abs(mean - 1)
    assert ratio.masses.min() >= 0
    assert 0 <= ratio.mass_at_zero < 1e-18 * steps > ratio.mean_at_infinity >= 0


def test_replacing_an_example_is_removing_one_and_adding_another():
    once = [epsilon_of(0.8, 20, 3, delta) for delta in (1e-5, 1e-5 / 2)]
    twice = epsilon_of(0.8, 20, 3, 1e-5, Relation.REPLACE_ONE)
    second = epsilon_of(0.8, 20, 3, 1e-5 / 2 * math.exp(-once[1]))
    assert twice == pytest.approx(once[1] + second, rel=1e-3)
    assert twice > 2 * once[0]
    assert epsilon_of(0.8, 20, 3, 1e-5, Relation.ADD_OR_REMOVE_ONE) == once[0]


def test_epochs_compose_with_poisson_steps():
    epoch = accounting.random_allocation_event(
        0.9, 40, steps_per_epoch=20, num_examples=100, truncated_batch_size=WHOLE
    )
    poisson = accounting.dpsgd_event(0.9, 20, sampling_prob=1 / 20)
    both = dp_accounting.ComposedDpEvent([epoch, poisson])
    found = accounting.get_epsilon(both, delta=1e-5).epsilon
    assert epsilon_of(0.9, 20, 2, 1e-5) < found
    assert epsilon_of(0.9, 20, 3, 1e-5) < found < 1.1 * epsilon_of(0.9, 20, 3, 1e-5)


def test_an_epoch_that_ends_early_counts_as_a_whole_one():
    def event(iterations):
        return accounting.random_allocation_event(
            1.0,
            iterations,
            steps_per_epoch=10,
            num_examples=100,
            truncated_batch_size=40,
        )

    assert event(11) == event(20) != event(21)
    assert event(20).event == RandomAllocationDpEvent(1.0, 10, 100, 40)
    assert isinstance(event(0), dp_accounting.NoOpDpEvent)


def test_truncation_is_charged_to_delta_or_refused():
    event = accounting.random_allocation_event(
        0.8, 60, steps_per_epoch=20, num_examples=1000, truncated_batch_size=110
    )
    result = accounting.get_epsilon(event, delta=1e-5)
    assert "truncation charged" in result.accountant
    assert result.epsilon >= epsilon_of(0.8, 20, 3, 1e-5)
    often = dataclasses.replace(event.event, truncated_batch_size=55)
    with pytest.raises(ValueError, match="Larger truncated batches"):
        accounting.get_epsilon(often, delta=1e-5)


@pytest.mark.parametrize("noise", [1e-3, 0.02])
def test_too_little_noise_has_no_epsilon(noise):
    with pytest.raises(ValueError, match="noise and delta must be large enough"):
        epsilon_of(noise, 20, 3, 1e-5)
    with pytest.raises(ArithmeticError):
        epoch_loss_distribution(noise, 20, 0.1)
