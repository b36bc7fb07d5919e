"""What a run costs, and how many of its steps a budget allows."""

import math

import pytest
from ledgers import MECHANISM

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
            account = Account(MECHANISM, Spent(), Spent(), start, 32 * "a")
            return account.stop_within(stop, budget)

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

    def test_few_epsilons_are_computed(self, steps_within):
        asked = []

        def epsilon(n):
            asked.append(n)
            return n / 1e6

        with pytest.warns(
            UserWarning, match="epsilon 0.5 ends the run after step 500000 of 10000"
        ):
            assert steps_within(0.5, epsilon, 0, 10**6) == 500_000
        assert len(asked) == len({*asked}) <= 22
        asked.clear()
        assert steps_within(1.0, epsilon, 0, 10**6) == 10**6
        assert asked == [10**6]

    def test_a_run_without_steps_needs_no_budget(self, steps_within):
        assert steps_within(0.5, lambda n: 7.0, 3, 3) == 3

    def test_a_budget_that_is_used_up_names_the_ledger(self, steps_within):
        with pytest.warns(UserWarning, match=r"after step 3 of 5. .*dpmp ledger DIR"):
            assert steps_within(0.5, lambda n: 7.0, 3, 5) == 3
