import dataclasses
import math

import dp_accounting
import hypothesis
import pytest
from hypothesis import strategies as st

from dpmp import DPSGD, accounting
from dpmp.mechanism import guarantee_of, guarantee_of_stages

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
    refused = pytest.raises(ValueError, match=r"one neighbouring relation.*REPLACE_ONE")
    with refused:
        guarantee_of({COST: 1, other: 1}, delta=1e-5)
    with refused:
        guarantee_of_stages([{COST: 1}, {other: 1}], delta=1e-5)


class TestStages:
    """Costs that were chosen one after the other."""

    WIDER = dataclasses.replace(COST, noise_multiplier=40.0)
    NARROWER = dataclasses.replace(COST, noise_multiplier=10.0)

    def test_one_cost_composes(self):
        for steps in (0, 30):
            result = guarantee_of_stages([{COST: steps}], delta=1e-5)
            assert result == guarantee_of({COST: steps}, delta=1e-5)
        assert guarantee_of_stages([], delta=1e-5) == guarantee_of({}, delta=1e-5)

    def test_epsilons_of_several_costs_are_added_with_a_split_delta(self):
        stages = [{COST: 70}, {self.WIDER: 20}, {self.NARROWER: 5}]
        parts = [
            guarantee_of({COST: 70}, delta=2.5e-6),
            guarantee_of({self.WIDER: 20}, delta=2.5e-6),
            guarantee_of({self.NARROWER: 5}, delta=2.5e-6),
        ]
        result = guarantee_of_stages(stages, delta=1e-5)
        assert result.delta == 1e-5 >= sum(part.delta for part in parts)
        total = sum(part.epsilon for part in parts)
        assert guarantee_of_stages(stages[::-1], delta=1e-5).epsilon == result.epsilon
        assert total <= result.epsilon == pytest.approx(total, rel=1e-12)
        assert result.accountant.endswith(", added up over 3 costs")
        assert result.neighboring_relation == parts[0].neighboring_relation

    @pytest.mark.parametrize("delta", [1e-5, 0.5])
    @pytest.mark.parametrize("steps", [(1, 1), (30, 20), (100, 1), (1, 100)])
    def test_they_cost_no_less_than_if_they_were_fixed_in_advance(self, steps, delta):
        made = [{COST: steps[0]}, {self.NARROWER: steps[1]}]
        in_advance = guarantee_of(made[0] | made[1], delta=delta)
        result = guarantee_of_stages(made, delta=delta)
        assert in_advance.epsilon <= result.epsilon

    def test_one_stage_without_privacy_leaves_no_epsilon(self):
        without_privacy = MECHANISM.without_privacy().step_cost
        stages = [{COST: 1}, {without_privacy: 1}]
        assert guarantee_of_stages(stages, delta=1e-5).epsilon == math.inf


@st.composite
def runs_that_go_on(draw):
    """Runs, and how many more steps each of them makes."""
    numbers = st.integers(0, 40)
    size = draw(st.integers(1, 4))
    starts, lengths, more = (
        draw(st.lists(numbers, min_size=size, max_size=size)) for _ in "abc"
    )
    runs = [range(x, x + 1 + n) for x, n in zip(starts, lengths, strict=True)]
    return runs, more


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sampling": "random_allocation", "sampling_prob": 1 / 7},
        {"cycle_length": 5},
    ],
)
@hypothesis.settings(max_examples=200)
@hypothesis.given(runs_that_go_on())
def test_a_plan_covers_whichever_run_makes_its_steps(fields, runs_that_go_on):
    cost = dataclasses.replace(COST, **fields)
    runs, more = runs_that_go_on
    later = [range(x.start, x.stop + n) for x, n in zip(runs, more, strict=True)]
    planned = sum(map(len, later))
    plan, made = cost.of_plan(runs, planned), cost.of_runs(later)
    assert all(plan[x] >= number for x, number in made.items())
    assert cost.of_plan(later, planned) == made
    if not fields:
        assert plan == {cost: planned}
    elif len(runs) == 1:
        assert plan == made
