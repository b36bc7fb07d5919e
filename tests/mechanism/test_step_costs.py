import dataclasses

import dp_accounting
import pytest

from dpmp import DPSGD, accounting
from dpmp.mechanism import guarantee_of

MECHANISM = DPSGD(
    num_examples=1000,
    expected_batch_size=1000,
    iterations=100,
    l2_clip_norm=1.0,
    noise_multiplier=20.0,
)
COST = MECHANISM.step_cost


def epsilon_of(steps):
    return guarantee_of(steps, delta=1e-5).epsilon


def test_no_steps_cost_nothing():
    without_privacy = MECHANISM.without_privacy().step_cost
    assert epsilon_of({}) == epsilon_of({COST: 0, without_privacy: 0}) == 0


def test_steps_of_two_costs_compose_to_one_gaussian():
    # 30 / 20^2 + 40 / 40^2 = 0.1 = 40 / 20^2
    wider = dataclasses.replace(COST, noise_multiplier=40.0)
    assert epsilon_of({COST: 30, wider: 40}) == pytest.approx(epsilon_of({COST: 40}))


@pytest.mark.parametrize("truncated_batch_size", [12, 16])
def test_a_person_is_added_to_all_datasets_or_removed_from_all(truncated_batch_size):
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    one, two = (
        dataclasses.replace(
            COST,
            num_examples=size,
            sampling_prob=0.1,
            truncated_batch_size=truncated_batch_size,
            noise_multiplier=1.0,
            neighboring_relation=relation,
        )
        for size in (90, 110)
    )
    epsilons = [
        accounting.get_epsilon(
            dp_accounting.ComposedDpEvent([one.event(3, x), two.event(5, y)]),
            delta=1e-5 * (1 - 1e-4),
            neighboring_relation=relation,
        ).epsilon
        for x, y in ((90, 110), (91, 111))
    ]
    assert epsilon_of({one: 3, two: 5}) == max(epsilons) > min(epsilons)


def test_costs_with_different_neighbours_do_not_compose():
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    other = dataclasses.replace(COST, neighboring_relation=relation)
    with pytest.raises(ValueError, match=r"one neighbouring relation.*REPLACE_ONE"):
        epsilon_of({COST: 1, other: 1})
