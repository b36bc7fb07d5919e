import dataclasses
import json
import math
import re

import dp_accounting
import pytest

from dpmp import DPSGD, strategies
from dpmp.__main__ import main
from dpmp.planning import (
    Plan,
    _plans,
    compare_batch_sizes,
    compare_noise,
    plan_command,
    plan_to_start_from,
)

RUN = ["--num-examples", "100", "--batch-size", "50", "--steps", "2"]
TARGET = ["--epsilon", "2", "--delta", "1e-5"]
NOISE = ["--noise-multiplier", "4.5", "--delta", "1e-5"]
MECHANISM = DPSGD(
    num_examples=100, expected_batch_size=50, iterations=2, l2_clip_norm=1.0
)


def run(capsys, *args):
    assert main(args) == 0
    return capsys.readouterr().out


def epsilon(capsys, *options):
    return json.loads(run(capsys, "epsilon", *RUN, *options, "--json"))["epsilon"]


def test_epsilon_is_the_mechanisms_rounded_up(capsys):
    text = run(capsys, "epsilon", *RUN, *NOISE)
    exact = dataclasses.replace(MECHANISM, noise_multiplier=4.5, delta=1e-5)
    assert epsilon(capsys, *NOISE) == exact.guarantee().epsilon
    assert 0 <= float(text.split()[1]) - exact.guarantee().epsilon < 1e-3
    replaced = epsilon(capsys, *NOISE, "--neighbors", "REPLACE_ONE")
    assert replaced > exact.guarantee().epsilon
    assert epsilon(capsys, *NOISE, "--neighbors", "replace_one") == replaced
    none = [*NOISE, "--noise-multiplier", "0"]
    assert "inf" in run(capsys, "epsilon", *RUN, *none)
    little = run(capsys, "epsilon", *RUN, *NOISE, "--noise-multiplier", "0.02")
    assert "inf" in little
    assert "so little noise" in " ".join(little.split())  # the reason
    assert "is published" in run(capsys, "epsilon", *RUN, *none, "--delta", "0.1")
    assert epsilon(capsys, *none) is None  # JSON has no infinity


def test_the_printed_noise_multiplier_is_enough(capsys):
    words = run(capsys, "calibrate", *RUN, *TARGET).split()
    printed = float(words[2].strip(","))
    noise = ["--noise-multiplier", str(printed), "--delta", "1e-5"]
    assert 1.99 < epsilon(capsys, *noise) <= 2


def test_plans_meet_the_target_at_equal_cost():
    target = {"epsilon": 2.0, "delta": 1e-5}
    plans = compare_batch_sizes(
        num_examples=100, num_processed=200, sizes=[100, 50], **target
    )
    assert [(x.batch_size, x.iterations) for x in plans] == [(50, 4), (100, 2)]
    for plan in plans:
        mechanism = DPSGD(
            num_examples=100,
            expected_batch_size=plan.batch_size,
            iterations=plan.iterations,
            l2_clip_norm=1.0,
            noise_multiplier=plan.noise_multiplier,
        )
        assert mechanism.guarantee(delta=1e-5).epsilon <= 2
        assert plan.noise_in_mean == pytest.approx(mechanism.stddev, rel=1e-2)


def test_the_first_plan_has_the_most_steps_of_the_good_ones():
    plans = [Plan(10, 1000, 1.0), Plan(100, 100, 1.2), Plan(1000, 10, 3.0)]
    assert [round(x.signal_over_noise) for x in plans] == [316, 833, 1054]
    assert plan_to_start_from(plans) == plans[1]


def test_one_row_of_the_table_is_marked(capsys, monkeypatch):
    def with_noise(mechanism, *, epsilon, delta):
        return dataclasses.replace(mechanism, noise_multiplier=1.0, delta=delta)

    monkeypatch.setattr(DPSGD, "calibrate", with_noise)
    monkeypatch.setattr(_plans, "_BANDS", (2,))
    args = ["--num-examples", "64", "--processed", "640", "--epsilon", "8"]
    rows = json.loads(run(capsys, "plan", *args, "--delta", "1e-3", "--json"))["plans"]
    assert [row["batch_size"] for row in rows] == [16, 32]
    assert sum(row["start_here"] for row in rows) == 1


def test_the_statement_is_the_mechanisms_and_names_options_that_help(capsys):
    text = run(capsys, "statement", *RUN, *TARGET)
    assert text.strip() == MECHANISM.calibrate(epsilon=2, delta=1e-5).statement()
    args = ["statement", *RUN, *TARGET, "--neighbors", "ADD_OR_REMOVE_ONE"]
    text = " ".join(run(capsys, *args).split())
    names = re.findall(r"Pass (\S+) to avoid this", text)
    assert names == ["sampling_prob", "truncated_batch_size"]
    flags = [f"--{name.replace('_', '-')}" for name in names]
    given = [*args, flags[0], "0.45", flags[1], "99"]
    assert "to avoid this" not in " ".join(run(capsys, *given).split())


def test_a_defect_of_a_command_keeps_its_traceback(monkeypatch):
    def defective(**_):
        raise ValueError("operands could not be broadcast together")

    monkeypatch.setattr(plan_command, "compare_batch_sizes", defective)
    with pytest.raises(ValueError, match="broadcast"):
        main(["plan", *TARGET, "--num-examples", "99", "--processed", "640"])


@pytest.mark.slow
def test_ways_to_draw_noise_are_compared():
    mechanism = DPSGD(
        num_examples=2000, expected_batch_size=100, iterations=60, l2_clip_norm=1.0
    )
    choices = compare_noise(mechanism, epsilon=8.0, delta=1e-5)
    names = {x.name: x for x in choices}
    assert set(names) == {"poisson", "random_allocation"} | {
        f"{bands} bands{kind}"
        for bands in (2, 4, 8, 16)
        for kind in ("", " of the inverse")
    }
    errors = [x.error for x in choices]
    assert errors == sorted(errors)
    poisson = names["poisson"]
    assert poisson.mechanism == mechanism.calibrate(epsilon=8.0, delta=1e-5)
    independent = math.sqrt(61 / 2)  # the mean number of steps so far
    expected = poisson.mechanism.noise_multiplier * independent
    assert poisson.error == pytest.approx(expected)
    bands = strategies.banded_toeplitz(4, iterations=60)
    inverse = strategies.banded_inverse(4, iterations=60, steps_per_epoch=20)
    for name, strategy, num_bytes in (
        ("4 bands", bands, 12),
        ("4 bands of the inverse", inverse, 0),
    ):
        found = names[name]
        assert found.mechanism.strategy == strategy
        expected = found.mechanism.noise_multiplier * strategy.error()
        assert found.error == expected < poisson.error
        assert found.bytes_per_parameter == num_bytes
    assert names["random_allocation"].error < poisson.error
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    for changed in ({"neighboring_relation": relation}, {"sampling_prob": 1 / 20}):
        given = dataclasses.replace(mechanism, **changed)
        choices = compare_noise(given, epsilon=8.0, delta=1e-5)
        assert [x.name for x in choices] == ["random_allocation", "poisson"]
    for target in ({"epsilon": -1.0}, {"delta": 2.0}, {"momentum": 1.5}):
        with pytest.raises(ValueError, match=next(iter(target))):
            compare_noise(mechanism, **{"epsilon": 8.0, "delta": 1e-5} | target)
