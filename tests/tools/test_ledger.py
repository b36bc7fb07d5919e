import dataclasses
import json

import dp_accounting
import pytest
from ledgers import MECHANISM, charged, file_of

from dpmp.__main__ import main
from dpmp.mechanism import guarantee_of, guarantee_of_stages
from dpmp.runs._ledger import Ledger

WIDER = dataclasses.replace(MECHANISM, noise_multiplier=30.0)


def write(directory, *records):
    directory.mkdir(exist_ok=True)
    ledger = Ledger(directory)
    for record in records:
        ledger.append(record)
    return directory


def released(start, stop, **fields):
    record = charged(start, stop, **fields)
    return dataclasses.replace(record, event="released", nonce="n", digest="d")


def added(planned):
    stages = [{mechanism.step_cost: number} for mechanism, number in planned.items()]
    return guarantee_of_stages(stages, delta=1e-5).epsilon


@pytest.fixture
def run(capsys):
    """Runs the command; returns what it prints."""

    def run_with(*args):
        assert main(["ledger", *map(str, args)]) == 0
        return capsys.readouterr().out

    return run_with


@pytest.fixture
def report(run):
    return lambda *args: json.loads(run(*args, "--json"))


def test_the_epsilon_of_a_directory_is_reported(tmp_path, run, report):
    write(tmp_path, released(0, 30), released(30, 50), released(0, 30, run="b"))
    result = report(tmp_path)
    expected = MECHANISM.guarantee(80)
    assert result["epsilon"] == result["epsilon_if_planned"] == expected.epsilon
    assert result["delta"] == 1e-5
    assert result["accountant"] == expected.accountant
    assert result["neighboring_relation"] == "REPLACE_SPECIAL"
    (row,) = result["directories"]
    steps = {"noise_multiplier": 20.0, "sampling_prob": 1.0, "sampling": "poisson"}
    steps |= {"cycle_length": 1, "number": 80}
    assert row["steps"] == [steps]
    assert (row["directory"], row["epsilon"]) == (str(tmp_path), expected.epsilon)
    text = run(tmp_path)
    printed = float(text.split("Together: epsilon ")[1].split()[0])
    assert 0 <= printed - expected.epsilon < 1e-3
    assert "without a checkpoint" not in text
    assert "were fixed before the first step" not in text


def test_steps_without_a_checkpoint_are_told(tmp_path, run, report):
    write(tmp_path, charged(0, 10), released(0, 8), charged(8, 12, run="b"))
    (row,) = report(tmp_path)["directories"]
    assert row["charged_alone"] == 6
    assert row["epsilon"] == MECHANISM.guarantee(14).epsilon
    text = run(tmp_path)
    assert "6 of the steps are paid for without a checkpoint in this directory" in text
    assert "2 of the steps have the number of another step and count as well" in text


def test_steps_of_several_costs_are_told_with_both_epsilons(tmp_path, run, report):
    # Its noise multiplier is that of the first.
    sampled = {"sampling_prob": 0.5, "truncated_batch_size": 1000}
    sampled = dataclasses.replace(MECHANISM, **sampled)
    write(
        tmp_path,
        released(0, 30),
        released(30, 50, run="b", mechanism=WIDER, planned=70),
        released(0, 5, run="c", mechanism=sampled),
    )
    result = report(tmp_path)
    assert result["epsilon"] == added({MECHANISM: 100, WIDER: 70, sampled: 100})
    made = {MECHANISM: 30, WIDER: 20, sampled: 5}
    costs = {mechanism.step_cost: number for mechanism, number in made.items()}
    if_planned = guarantee_of(costs, delta=1e-5).epsilon
    assert result["epsilon_if_planned"] == if_planned < result["epsilon"]
    text = run(tmp_path)
    assert "were fixed before the first step: epsilon" in text
    for number, noise, prob in ((30, 20, 1), (20, 30, 1), (5, 20, 0.5)):
        steps = f"{number} steps with noise multiplier {noise} and sampling probability"
        assert f"{steps} {prob}" in text


def test_costs_of_several_directories_count_with_all_planned_steps(tmp_path, report):
    """Nobody can say in which order their steps were made."""
    one = write(tmp_path / "one", released(0, 30))
    other = released(0, 20, run="b", mechanism=WIDER, planned=70)
    two = write(tmp_path / "two", other)
    assert report(one, two)["epsilon"] == added({MECHANISM: 100, WIDER: 70})
    # The steps of one cost add up over the directories, as they were planned.
    three = write(tmp_path / "three", released(0, 10, run="c"))
    for order in ((one, two, three), (three, two, one)):
        assert report(*order)["epsilon"] == added({MECHANISM: 200, WIDER: 70})
    # A copy costs nothing more.
    copy = write(tmp_path / "copy", released(0, 30), other)
    assert report(one, two, copy)["epsilon"] == added({MECHANISM: 100, WIDER: 70})
    assert report(two)["epsilon"] == added({WIDER: 20})


def test_directories_compose_and_copies_count_once(tmp_path, report):
    one = write(tmp_path / "one", released(0, 30))
    two = write(tmp_path / "two", released(0, 30, run="b"))
    copy = write(tmp_path / "copy", released(0, 40))
    result = report(one, two, copy, "--delta", "1e-6")
    assert result["epsilon"] == MECHANISM.guarantee(70, delta=1e-6).epsilon
    rows = {x["directory"]: x["epsilon"] for x in result["directories"]}
    assert rows == {
        str(path): MECHANISM.guarantee(number, delta=1e-6).epsilon
        for path, number in ((one, 30), (two, 30), (copy, 40))
    }


def test_without_privacy_epsilon_is_infinite(tmp_path, run, report):
    write(tmp_path, released(0, 3, mechanism=MECHANISM.without_privacy()))
    assert report(tmp_path)["epsilon"] is None
    assert "Together: epsilon inf " in run(tmp_path)


def test_an_incomplete_record_is_reported_and_stays(tmp_path, run, report):
    write(tmp_path, released(0, 30), released(30, 40))
    file = file_of(tmp_path)
    file.write_bytes(torn := file.read_bytes()[:-20])
    result = report(tmp_path)
    assert result["epsilon"] == MECHANISM.guarantee(30).epsilon
    number = result["directories"][0]["incomplete_bytes"]
    text = f"incomplete record of {number} bytes, whose steps are free"
    assert text in run(tmp_path)
    assert file.read_bytes() == torn


def test_a_directory_without_a_readable_ledger_is_refused(tmp_path, refusal):
    assert "before its first release a run has none" in refusal("ledger", tmp_path)
    write(tmp_path, released(0, 30), released(30, 40))
    file = file_of(tmp_path)
    file.write_bytes(file.read_bytes().replace(b'"start": 30', b'"start": 39'))
    assert "ledger.jsonl, line 2" in refusal("ledger", tmp_path)
    file.unlink()
    file.mkdir()
    assert "must have a ledger that can be read" in refusal("ledger", tmp_path)


def test_a_ledger_that_is_older_than_a_checkpoint_is_refused(tmp_path, run, refusal):
    """Its epsilon would be too small."""
    (tmp_path / "checkpoints").mkdir()  # runs may be in a folder of this name
    directory = write(tmp_path / "checkpoints" / "run", charged(0, 2), released(2, 4))
    whole = (directory / "ledger.jsonl").read_bytes()
    checkpoint = directory / "checkpoints" / "4"
    checkpoint.mkdir(parents=True)
    (checkpoint / "facts.json").write_text('{"nonce": "n"}')
    first = whole.partition(b"\n")[0]
    (checkpoint / "ledger.jsonl").write_bytes(first)
    assert "epsilon" in run(directory)
    assert "a checkpoint has a copy of the ledger" in refusal("ledger", checkpoint)
    for older in (first, b""):
        (directory / "ledger.jsonl").write_bytes(older)
        assert "must be as new as the checkpoints" in refusal("ledger", directory)


def test_a_delta_must_be_given_where_there_is_not_one(tmp_path, report, refusal):
    for delta, deltas in ((None, "[]"), (1e-5, None), (1e-6, "[1e-06, 1e-05]")):
        write(tmp_path, dataclasses.replace(released(0, 30), delta=delta))
        if deltas is None:
            assert report(tmp_path)["delta"] == delta
        else:
            assert f"deltas={deltas}" in refusal("ledger", tmp_path)
    assert "delta must be in" in refusal("ledger", tmp_path, "--delta", "2")


def test_runs_with_different_neighbours_are_refused(tmp_path, refusal):
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    other = dataclasses.replace(MECHANISM, neighboring_relation=relation)
    one = write(tmp_path / "one", released(0, 30))
    two = write(tmp_path / "two", released(0, 30, run="b", mechanism=other))
    assert "one neighbouring relation" in refusal("ledger", one, two)
