import math

import pytest

from dpmp.runs._budget import most_steps

CURVES = {
    "proportional": lambda n: n / 100,
    "root": lambda n: math.sqrt(n) / 10,
    "after_other_runs": lambda n: 0.7 + 1e-5 * n,
    "infinite": lambda n: math.inf if n > 777 else 0.1,
    "stairs": lambda n: (n // 50) / 10,
    "steep": lambda n: n**5 / 1e9,
}


def expected(epsilon, budget, wanted):
    return next((n for n in range(wanted, 0, -1) if epsilon(n) <= budget), 0)


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("wanted", [1, 2, 10, 1000])
@pytest.mark.parametrize("budget", [0.005, 0.1, 0.75, 1.0, 3.3])
def test_the_largest_number_within_the_budget_is_found(name, wanted, budget):
    epsilon = CURVES[name]
    found = most_steps(epsilon, budget, wanted)
    assert found == expected(epsilon, budget, wanted)


@pytest.mark.parametrize("name", ["proportional", "root", "after_other_runs", "steep"])
def test_smooth_curves_need_few_epsilons(name):
    asked = []

    def epsilon(steps):
        asked.append(steps)
        return CURVES[name](steps)

    found = most_steps(epsilon, 1.2345, 10**6)
    assert CURVES[name](found) <= 1.2345 < CURVES[name](found + 1)
    assert len(asked) == len(set(asked)) <= 18  # halving alone takes 22


def test_an_epsilon_that_falls_here_and_there_still_gives_a_boundary():
    def epsilon(steps):
        return steps / 100 + 0.05 * math.cos(steps)

    found = most_steps(epsilon, 1.0, 1000)
    assert epsilon(found) <= 1.0 < epsilon(found + 1)
