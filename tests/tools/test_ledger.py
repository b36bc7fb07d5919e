import dataclasses
import json
import math

import dp_accounting
import pytest
from ledgers import MECHANISM, charged, file_of

from dpmp.__main__ import main
from dpmp.mechanism import guarantee_of, guarantee_of_stages
from dpmp.runs._ledger import Ledger, write_charge_file

WIDER = dataclasses.replace(MECHANISM, noise_multiplier=30.0)


def write(directory, *records):
    directory.mkdir(exist_ok=True)
    ledger = Ledger(directory)
    for record in records:
        ledger.append(record)


def released(start, stop, **fields):
    record = charged(start, stop, **fields)
    return dataclasses.replace(record, event="released", nonce="n", digest="d")


def report(capsys, *args):
    assert main(["ledger", *map(str, args), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def text_of(capsys, *args):
    assert main(["ledger", *map(str, args)]) == 0
    return capsys.readouterr().out


def refusal(capsys, *args):
    with pytest.raises(SystemExit) as error:
        main(["ledger", *map(str, args)])
    assert error.value.code == 2
    return capsys.readouterr().err


def test_a_copy_of_a_directory_costs_nothing_more(tmp_path, capsys):
    records = released(0, 30), released(30, 50, run="b", mechanism=WIDER)
    for name in ("first", "copy"):
        write(tmp_path / name, *records)
    both = report(capsys, tmp_path / "first", tmp_path / "copy")
    planned = dict.fromkeys((MECHANISM.step_cost, WIDER.step_cost), 100)
    assert both["epsilon"] == guarantee_of_stages(planned, delta=1e-5).epsilon


def test_the_epsilon_of_a_directory_is_reported(tmp_path, capsys):
    write(tmp_path, released(0, 30), released(30, 50), released(0, 30, run="b"))
    result = report(capsys, tmp_path)
    expected = MECHANISM.guarantee(80)
    assert result["epsilon"] == result["epsilon_if_planned"] == expected.epsilon
    assert result["delta"] == 1e-5
    assert result["accountant"] == expected.accountant
    assert result["neighboring_relation"] == "REPLACE_SPECIAL"
    (row,) = result["directories"]
    assert row["steps"] == [
        {"noise_multiplier": 20.0, "sampling_prob": 1.0, "number": 80}
    ]
    assert (row["directory"], row["epsilon"]) == (str(tmp_path), expected.epsilon)
    assert row["first_time"].endswith("+00:00")
    text = text_of(capsys, tmp_path)
    assert "80 steps with noise multiplier 20 and sampling probability 1;" in text
    printed = float(text.split("Together: epsilon ")[1].split()[0])
    assert 0 <= printed - expected.epsilon < 1e-3
    assert "without a checkpoint" not in text
    assert "were fixed before the first step" not in text
    assert "Every step that was released counts" in text


def test_steps_without_a_checkpoint_are_told(tmp_path, capsys):
    write(tmp_path, charged(0, 10), released(0, 8), charged(8, 12, run="b"))
    (row,) = report(capsys, tmp_path)["directories"]
    assert row["charged_alone"] == 6
    assert row["epsilon"] == MECHANISM.guarantee(14).epsilon
    text = text_of(capsys, tmp_path)
    assert "6 of the steps are paid for without a checkpoint" in text


def test_steps_of_several_costs_are_told_with_both_epsilons(tmp_path, capsys):
    sampled = dataclasses.replace(
        MECHANISM,
        sampling_prob=0.5,
        truncated_batch_size=1000,
    )
    write(
        tmp_path,
        released(0, 30),
        released(30, 50, run="b", mechanism=WIDER, planned=70),
        released(0, 5, run="c", mechanism=sampled),
    )
    costs = [x.step_cost for x in (MECHANISM, WIDER, sampled)]
    made = dict(zip(costs, (30, 20, 5), strict=True))
    stages = dict(zip(costs, (100, 70, 5), strict=True))
    result = report(capsys, tmp_path)
    added = guarantee_of_stages(stages, delta=1e-5).epsilon
    assert result["epsilon"] == added
    if_planned = guarantee_of(made, delta=1e-5).epsilon
    assert result["epsilon_if_planned"] == if_planned < added
    text = text_of(capsys, tmp_path)
    assert "20 steps with noise multiplier 30" in text
    assert "were fixed before the first step: epsilon" in text
    # The third cost has the noise multiplier of the first.
    assert "30 steps with noise multiplier 20 and sampling probability 1" in text
    assert "5 steps with noise multiplier 20 and sampling probability 0.5" in text


def test_costs_of_several_directories_count_with_all_planned_steps(tmp_path, capsys):
    """Nobody can say in which order their steps were made."""
    write(tmp_path / "one", released(0, 30))
    write(tmp_path / "two", released(0, 20, run="b", mechanism=WIDER, planned=70))
    stages = {MECHANISM.step_cost: 100, WIDER.step_cost: 70}
    result = report(capsys, tmp_path / "one", tmp_path / "two")
    assert result["epsilon"] == guarantee_of_stages(stages, delta=1e-5).epsilon
    # The steps of one cost add up over the directories, as they were planned.
    write(tmp_path / "three", released(0, 10, run="c"))
    stages[MECHANISM.step_cost] = 200
    names = [tmp_path / x for x in ("one", "two", "three")]
    for order in (names, names[::-1]):
        epsilon = report(capsys, *order)["epsilon"]
        assert epsilon == guarantee_of_stages(stages, delta=1e-5).epsilon
    alone = report(capsys, tmp_path / "two")["epsilon"]
    assert alone == guarantee_of({WIDER.step_cost: 20}, delta=1e-5).epsilon


def test_directories_compose_and_copies_count_once(tmp_path, capsys):
    one, two, copy = (tmp_path / name for name in ("one", "two", "copy"))
    write(one, released(0, 30))
    write(two, released(0, 30, run="b"))
    write(copy, released(0, 40))
    result = report(capsys, one, two, copy, "--delta", "1e-6")
    assert result["epsilon"] == MECHANISM.guarantee(70, delta=1e-6).epsilon
    rows = {x["directory"]: x["epsilon"] for x in result["directories"]}
    assert rows == {
        str(path): MECHANISM.guarantee(number, delta=1e-6).epsilon
        for path, number in ((one, 30), (two, 30), (copy, 40))
    }


def test_charges_that_other_processes_left_count(tmp_path, capsys):
    write_charge_file(tmp_path, charged(0, 30))
    names = {*tmp_path.iterdir()}
    assert report(capsys, tmp_path)["epsilon"] == MECHANISM.guarantee(30).epsilon
    assert {*tmp_path.iterdir()} == names


def test_without_privacy_epsilon_is_infinite(tmp_path, capsys):
    write(tmp_path, released(0, 3, mechanism=MECHANISM.without_privacy()))
    assert report(capsys, tmp_path)["epsilon"] is None
    text = text_of(capsys, tmp_path)
    assert "3 steps with noise multiplier 0" in text
    assert "epsilon inf" in text
    assert math.isinf(float(text.split("Together: epsilon ")[1].split()[0]))


def test_an_incomplete_record_is_reported_and_stays(tmp_path, capsys):
    write(tmp_path, released(0, 30), released(30, 40))
    file = file_of(tmp_path)
    file.write_bytes(torn := file.read_bytes()[:-20])
    result = report(capsys, tmp_path)
    assert result["epsilon"] == MECHANISM.guarantee(30).epsilon
    text = text_of(capsys, tmp_path)
    number = result["directories"][0]["incomplete_bytes"]
    assert f"incomplete record of {number} bytes, whose steps are free" in text
    assert file.read_bytes() == torn


def test_a_directory_without_a_readable_ledger_is_refused(tmp_path, capsys):
    assert "reason='there is none'" in refusal(capsys, tmp_path)
    write(tmp_path, released(0, 30), released(30, 40))
    file = file_of(tmp_path)
    file.write_bytes(file.read_bytes().replace(b'"start": 30', b'"start": 39'))
    assert "ledger.jsonl, line 2" in refusal(capsys, tmp_path)
    file.unlink()
    file.mkdir()
    assert "must have a ledger that can be read" in refusal(capsys, tmp_path)


def test_a_delta_must_be_given_where_there_is_not_one(tmp_path, capsys):
    def with_delta(delta):
        return dataclasses.replace(released(0, 30), delta=delta)

    write(tmp_path, with_delta(None))
    assert "deltas=[]" in refusal(capsys, tmp_path)
    write(tmp_path, with_delta(1e-5))
    assert report(capsys, tmp_path)["delta"] == 1e-5
    write(tmp_path, with_delta(1e-6))
    assert "deltas=[1e-06, 1e-05]" in refusal(capsys, tmp_path)
    assert "delta must be in" in refusal(capsys, tmp_path, "--delta", "2")


def test_runs_with_different_neighbours_are_refused(tmp_path, capsys):
    one, two = tmp_path / "one", tmp_path / "two"
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    other = dataclasses.replace(MECHANISM, neighboring_relation=relation)
    write(one, released(0, 30))
    write(two, released(0, 30, run="b", mechanism=other))
    assert "one neighbouring relation" in refusal(capsys, one, two)
