"""What a run costs, and how many of its steps a budget allows."""

import math
import re

import pytest
from ledgers import MECHANISM
from small_runs import (
    ANOTHER_MECHANISM,
    DELTA,
    FailureError,
    Source,
    epsilon_of,
    fit,
    fresh_trainer,
    new_trainer,
    noisier_trainer,
    num_paid,
)

from dpmp.accounting import round_up
from dpmp.mechanism import guarantee_of_stages
from dpmp.runs import Spent
from dpmp.training._account import Account

CURVES = {
    "proportional": lambda n: n / 100,
    "root": lambda n: math.sqrt(n) / 10,
    "after other runs": lambda n: 0.7 + 1e-5 * n,
    "infinite": lambda n: math.inf if n > 777 else 0.1,
    "stairs": lambda n: (n // 50) / 10,
}


class TestBudget:
    @pytest.fixture
    def steps_within(self, monkeypatch):
        def steps_within(budget, epsilon, start, stop):
            monkeypatch.setattr(Account, "epsilon", lambda self, n: epsilon(n))
            account = Account(MECHANISM, Spent(), Spent(), start, stop, 32 * "a")
            return account.within(stop, budget).end

        return steps_within

    @pytest.mark.parametrize("name", CURVES)
    @pytest.mark.parametrize("start", [0, 5])
    @pytest.mark.parametrize("budget", [0.05, 0.75, 3.3])
    @pytest.mark.filterwarnings("ignore:the budget of epsilon")
    def test_the_largest_number_of_steps_within_the_budget_is_found(
        self, steps_within, name, start, budget
    ):
        epsilon = CURVES[name]
        for stop in (start + 1, start + 2, start + 10, 1000):
            allowed = [n for n in range(start + 1, stop + 1) if epsilon(n) <= budget]
            if allowed or start:
                last = max([start, *allowed])
                assert steps_within(budget, epsilon, start, stop) == last
            else:
                with pytest.raises(ValueError, match="must allow a first step"):
                    steps_within(budget, epsilon, start, stop)

    def test_a_run_without_steps_needs_no_budget(self, steps_within):
        assert steps_within(0.5, lambda n: 7.0, 3, 3) == 3


@ANOTHER_MECHANISM
def test_a_budget_limits_what_is_planned_of_a_second_cost(tmp_path):
    first, second = fresh_trainer(), noisier_trainer()
    costs = [x.mechanism.step_cost for x in (first, second)]
    budget = guarantee_of_stages([{costs[0]: 7}, {costs[1]: 3}], delta=DELTA)
    fit(first, tmp_path, stop_at=2)
    for _ in range(2):
        spent = re.escape(round_up(budget.epsilon))
        said = f"ends the run after step 5 of 7, with epsilon {spent} spent"
        with pytest.warns(UserWarning, match=said):
            state = fit(second, tmp_path, epsilon_budget=budget.epsilon)
        assert int(state.step) == num_paid(tmp_path) == 5
        assert epsilon_of(tmp_path) == budget.epsilon
        assert second.guarantee(state).epsilon == budget.epsilon


def test_a_longer_plan_is_warned_of_without_a_budget(tmp_path):
    fit(fresh_trainer(), tmp_path, stop_at=3)
    fit(fresh_trainer(), tmp_path)  # the rest of the plan
    fit(fresh_trainer(), tmp_path)  # nothing
    longer = new_trainer(iterations=9)
    fit(longer, tmp_path, stop_at=8, epsilon_budget=100.0)
    for before, now in ((9, 10), (10, 12)):  # with a planned step left, and without
        longer = new_trainer(iterations=now)
        said = f"planned for {before} steps with this mechanism, and now for {now}"
        with pytest.warns(UserWarning, match=said):
            fit(longer, tmp_path, stop_at=now - 1)
        fit(longer, tmp_path)  # the rest of the new plan


@ANOTHER_MECHANISM
@pytest.mark.filterwarnings("ignore:the ledger has paid")
def test_another_mechanism_or_an_error_makes_no_longer_plan(tmp_path):
    fit(fresh_trainer(), tmp_path, stop_at=2)
    second = noisier_trainer()
    fit(second, tmp_path, stop_at=3)

    def fail():
        raise FailureError

    with pytest.raises(RuntimeError):
        fit(second, tmp_path, data=Source(2, fail))
    for stop in (5, 7):
        fit(second, tmp_path, stop_at=stop)
