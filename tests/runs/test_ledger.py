import dataclasses

import dp_accounting
import numpy as np
import pytest
from ledgers import DELTA, MECHANISM, entry_of, epsilon_of, file_of, num_steps

from dpmp import DPSGD, accounting
from dpmp.noise_addition._discrete_gaussian import LARGEST_TOTAL_VARIATION
from dpmp.runs import Ledger, _ledger
from dpmp.runs._history import Run
from dpmp.runs._records import Record


class TestCounting:
    def test_epsilon_is_that_of_everything_ever_begun(self, tmp_path):
        assert epsilon_of(tmp_path) == 0
        entry_of(Ledger.open(tmp_path)).begin(0, 30)
        ledger = Ledger.open(tmp_path)
        entry_of(ledger).begin(30, 50)
        expected = MECHANISM.guarantee(50).epsilon
        assert ledger.guarantee(delta=DELTA).epsilon == expected
        assert epsilon_of(tmp_path) == expected

    def test_repeated_steps_count_once(self, tmp_path):
        entry_of(Ledger.open(tmp_path)).begin(0, 30)
        entry_of(Ledger.open(tmp_path)).begin(10, 50)
        entry_of(Ledger.open(tmp_path)).begin(60, 70)
        (run,) = Ledger.open(tmp_path).runs
        assert run.steps == (range(0, 50), range(60, 70))
        assert (run.num_steps, run.num_begun) == (60, 80)
        assert epsilon_of(tmp_path) == MECHANISM.guarantee(60).epsilon

    def test_planning_otherwise_does_not_make_another_run(self, tmp_path):
        other = dataclasses.replace(MECHANISM, iterations=70, delta=1e-7)
        for mechanism in (MECHANISM, other):
            entry_of(Ledger.open(tmp_path), mechanism).begin(0, 30)
        assert num_steps(tmp_path) == 30

    def test_another_key_counts_twice(self, tmp_path):
        for key in ("one", "two"):
            entry_of(Ledger.open(tmp_path), key=key).begin(0, 30)
        assert epsilon_of(tmp_path) == MECHANISM.guarantee(60).epsilon

    @pytest.mark.parametrize(
        "change", [{"data": "other"}, {"mechanism": {"noise_multiplier": 30.0}}]
    )
    def test_other_data_or_costs_count_twice_for_other_steps(self, tmp_path, change):
        mechanism = dataclasses.replace(MECHANISM, **change.pop("mechanism", {}))
        entry_of(Ledger.open(tmp_path)).begin(0, 30)
        entry_of(Ledger.open(tmp_path), mechanism, **change).begin(30, 60)
        ledger = Ledger.open(tmp_path)
        assert len(ledger.runs) == 2
        signal = np.sqrt(30 / 20.0**2 + 30 / mechanism.noise_multiplier**2)
        event = dp_accounting.GaussianDpEvent(1 / signal)
        by_hand = accounting.get_epsilon(event, delta=DELTA * (1 - 1e-4)).epsilon
        assert ledger.guarantee(delta=DELTA).epsilon == pytest.approx(by_hand, 1e-9)

    @pytest.mark.parametrize(
        "change", [{"data": "other"}, {"mechanism": {"noise_multiplier": 30.0}}]
    )
    def test_noise_is_not_used_twice(self, tmp_path, change):
        mechanism = dataclasses.replace(MECHANISM, **change.pop("mechanism", {}))
        entry_of(Ledger.open(tmp_path)).begin(0, 30)
        before = file_of(tmp_path).read_bytes()
        entry = entry_of(Ledger.open(tmp_path), mechanism, **change)
        with pytest.raises(ValueError, match="would cancel in the difference"):
            entry.begin(29, 40)
        with pytest.raises(ValueError, match="would cancel in the difference"):
            entry.steps_within(100.0, delta=DELTA, start=29, stop=40)
        assert file_of(tmp_path).read_bytes() == before

    def test_noise_that_would_be_used_twice_can_be_foreseen(self, tmp_path):
        entry_of(Ledger.open(tmp_path)).begin(0, 30)
        ledger = Ledger.open(tmp_path)
        assert not entry_of(ledger).repeats_noise(0, 40)
        assert not entry_of(ledger, key="other", data="other").repeats_noise(0, 40)
        assert not entry_of(ledger, data="other").repeats_noise(30, 40)
        assert entry_of(ledger, data="other").repeats_noise(29, 40)

    def test_steps_that_a_stopped_run_did_not_begin_cost_nothing(self, tmp_path):
        entry = entry_of(Ledger.open(tmp_path))
        entry.begin(0, 10)
        entry.begin(10, 50)
        for step in (9, 50, 51):  # all of the block was begun, or another block
            entry.stop_before(step)
            assert num_steps(tmp_path) == 50
        entry.stop_before(20)
        entry.stop_before(15)
        entry.stop_before(17)
        (run,) = Ledger.open(tmp_path).runs
        assert (run.steps, run.num_begun) == ((range(0, 15),), 15)
        entry.begin(15, 20)
        assert num_steps(tmp_path) == 20

    def test_what_was_begun_before_a_repetition_stays_begun(self, tmp_path):
        entry_of(Ledger.open(tmp_path)).begin(0, 50)
        entry = entry_of(Ledger.open(tmp_path))
        entry.begin(20, 60)
        entry.stop_before(30)
        (run,) = Ledger.open(tmp_path).runs
        assert (run.steps, run.num_begun) == ((range(0, 50),), 60)
        entry_of(Ledger.open(tmp_path)).stop_before(10)  # it has begun nothing
        assert num_steps(tmp_path) == 50

    @pytest.mark.parametrize(("start", "stop"), [(10, 20), (5, 50), (50, 60), (40, 60)])
    def test_only_the_end_of_the_last_record_can_be_taken_back(self, start, stop):
        fields = {"time": "2026", "dpmp": "", "jax": "", "key": "", "data": ""}
        cost = {"delta": None, "cost": MECHANISM.step_cost}
        run = Run(key="", data="", cost=MECHANISM.step_cost)
        run = run.with_record(
            Record(event="begin", start=10, stop=50, **fields, **cost)
        ).with_record(
            Record(event="not begun", start=start, stop=stop, **fields, **cost)
        )
        assert set(range(10, 50)) <= {x for steps in run.steps for x in steps}

    def test_runs_of_several_mechanisms_compose(self, tmp_path):
        sampled = [
            DPSGD(
                num_examples=1000,
                expected_batch_size=size,
                iterations=10,
                l2_clip_norm=1.0,
                noise_multiplier=1.0,
                delta=DELTA,
                truncated_batch_size=truncated,
            )
            for size, truncated in ((10, 40), (50, 1000))
        ]
        for number, mechanism in enumerate(sampled):
            entry_of(Ledger.open(tmp_path), mechanism, key=str(number)).begin(0, 10)
        truncated = dp_accounting.TruncatedSubsampledGaussianDpEvent(1000, 0.01, 40, 1)
        gaussian = dp_accounting.GaussianDpEvent(1.0)
        poisson = dp_accounting.PoissonSampledDpEvent(0.05, gaussian)
        accountant = dp_accounting.pld.PLDAccountant(
            dp_accounting.NeighboringRelation.REPLACE_SPECIAL, 1e-4
        )
        accountant.compose(truncated, 10).compose(poisson, 10)
        by_hand = accountant.get_epsilon(DELTA)
        assert epsilon_of(tmp_path) == pytest.approx(by_hand, rel=2e-3)
        assert epsilon_of(tmp_path) > sampled[1].guarantee().epsilon

    def test_without_privacy_epsilon_is_infinite(self, tmp_path):
        entry_of(Ledger.open(tmp_path), MECHANISM.without_privacy()).begin(0, 1)
        entry_of(Ledger.open(tmp_path), key="other").begin(0, 1)
        assert epsilon_of(tmp_path) == np.inf

    @pytest.mark.parametrize("log_delta", np.arange(-19.0, -16.0, 0.25))
    def test_delta_is_charged_for_the_samplers_of_all_runs(self, tmp_path, log_delta):
        delta = 10**log_delta
        for number in (10_000_000, 30_000_000):
            mechanism = dataclasses.replace(MECHANISM, num_parameters=number)
            entry_of(Ledger.open(tmp_path), mechanism, key=str(number)).begin(0, 50)
        event = dp_accounting.GaussianDpEvent(20.0 / 100**0.5)
        ideal = accounting.get_epsilon(event, delta=delta * (1 - 1e-4)).epsilon
        variation = 50 * 40_000_006 * LARGEST_TOTAL_VARIATION
        is_covered = (1 + np.exp(ideal)) * variation <= 1e-4 * delta
        expected = pytest.approx(ideal) if is_covered else np.inf
        assert epsilon_of(tmp_path, delta) == expected

    def test_a_person_who_is_added_is_added_to_all_datasets(self, tmp_path):
        relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
        mechanism = DPSGD(
            num_examples=100,
            expected_batch_size=10,
            iterations=20,
            l2_clip_norm=1.0,
            noise_multiplier=1.0,
            delta=DELTA,
            truncated_batch_size=16,
            neighboring_relation=relation,
        )
        for key in ("one", "two"):
            entry_of(Ledger.open(tmp_path), mechanism, key=key).begin(0, 10)
        assert epsilon_of(tmp_path) == mechanism.guarantee(20).epsilon

    def test_different_neighbours_are_refused_before_the_first_step(self, tmp_path):
        relation = dp_accounting.NeighboringRelation.REPLACE_ONE
        other = dataclasses.replace(MECHANISM, neighboring_relation=relation)
        entry_of(Ledger.open(tmp_path)).begin(0, 30)
        with pytest.raises(ValueError, match="must have one neighbouring relation"):
            entry_of(Ledger.open(tmp_path), other, key="other")

    @pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 3), (5, 3), (0.5, 3)])
    def test_impossible_steps_are_refused(self, tmp_path, start, stop):
        with pytest.raises(ValueError, match=r"must be (an integer|above start)"):
            entry_of(Ledger.open(tmp_path)).begin(start, stop)


class TestBudget:
    @pytest.mark.parametrize("budget", [0.5, 1.7, 4.0])
    def test_the_next_step_would_exceed_the_budget(self, tmp_path, budget):
        ledger = Ledger.open(tmp_path)
        entry_of(ledger, key="earlier").begin(0, 7)
        entry = entry_of(ledger)
        number = entry.steps_within(budget, delta=DELTA, start=0, stop=100_000)
        assert MECHANISM.guarantee(7).epsilon < budget
        far = dataclasses.replace(MECHANISM, iterations=100_000)
        assert far.guarantee(7 + number).epsilon <= budget
        assert far.guarantee(8 + number).epsilon > budget

    def test_repeated_steps_are_free(self, tmp_path):
        ledger = Ledger.open(tmp_path)
        entry = entry_of(ledger)
        entry.begin(0, 40)
        budget = MECHANISM.guarantee(50).epsilon
        for start in (0, 30, 40):
            number = entry.steps_within(budget, delta=DELTA, start=start, stop=99)
            assert start + number == 50

    def test_no_more_steps_are_allowed_than_wanted_or_left(self, tmp_path):
        entry = entry_of(Ledger.open(tmp_path))
        assert entry.steps_within(100.0, delta=DELTA, start=3, stop=9) == 6
        entry.begin(0, 9)
        assert entry.steps_within(0.01, delta=DELTA, start=3, stop=9) == 0

    def test_few_epsilons_are_computed(self, tmp_path, monkeypatch):
        calls = []
        real = _ledger.guarantee
        monkeypatch.setattr(
            _ledger, "guarantee", lambda *a, **k: calls.append(a) or real(*a, **k)
        )
        entry = entry_of(Ledger.open(tmp_path))
        assert 0 < entry.steps_within(3.0, delta=DELTA, start=0, stop=10**6) < 10**6
        assert len(calls) <= 14

    @pytest.mark.parametrize("budget", [0, -1.0, np.inf, np.nan])
    def test_an_impossible_budget_is_refused(self, tmp_path, budget):
        with pytest.raises(ValueError, match="epsilon_budget must be"):
            entry_of(Ledger.open(tmp_path)).steps_within(
                budget, delta=DELTA, start=0, stop=1
            )


def test_the_epsilon_to_come_counts_the_ledger_and_the_steps_since(tmp_path):
    ledger = Ledger.open(tmp_path)
    entry_of(ledger, key="lost").begin(0, 30)
    entry = entry_of(ledger)
    entry.begin(20, 30)
    epsilon = entry.epsilon_after(20, delta=DELTA)
    assert epsilon(25) == MECHANISM.guarantee(30 + 10).epsilon  # 10 are begun already
    assert epsilon(50) == MECHANISM.guarantee(30 + 30).epsilon
    entry.begin(30, 50)
    assert epsilon(40) == MECHANISM.guarantee(30 + 20).epsilon
    assert epsilon(50) == epsilon_of(tmp_path)
