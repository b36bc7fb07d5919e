import dataclasses
import json

import dp_accounting
import pytest

from dpmp import DPSGD
from dpmp.__main__ import main
from dpmp.runs import Ledger

MECHANISM = DPSGD(
    num_examples=1000,
    expected_batch_size=1000,
    iterations=100,
    l2_clip_norm=1.0,
    noise_multiplier=20.0,
    delta=1e-5,
)


def begin(directory, *, start=0, stop=30, key="key", data="data", **fields):
    directory.mkdir(exist_ok=True)
    mechanism = dataclasses.replace(MECHANISM, **fields)
    ledger = Ledger.open(directory)
    ledger.entry(mechanism, key_fingerprint=key, data_tag=data).begin(start, stop)


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


def test_the_epsilon_of_a_directory_is_reported(tmp_path, capsys):
    begin(tmp_path)
    begin(tmp_path, start=20, stop=50)
    begin(tmp_path, key="other")
    result = report(capsys, tmp_path)
    assert result["epsilon"] == MECHANISM.guarantee(80).epsilon
    assert result["delta"] == 1e-5
    first, second = result["runs"]
    assert (first["steps"], first["repeated"], first["key"]) == (50, 10, "key")
    assert first["epsilon"] == MECHANISM.guarantee(50).epsilon
    assert (second["steps"], second["repeated"]) == (30, 0)
    text = text_of(capsys, tmp_path)
    assert "50 steps begun (10 times one was repeated)" in text
    printed = float(text.split("All runs together: epsilon ")[1].split()[0])
    assert 0 <= printed - result["epsilon"] < 1e-3


def test_directories_compose_and_copies_count_once(tmp_path, capsys):
    one, two, copy = (tmp_path / name for name in ("one", "two", "copy"))
    begin(one)
    begin(two, key="other")
    begin(copy, stop=40)
    result = report(capsys, one, two, copy, "--delta", "1e-6")
    assert result["epsilon"] == MECHANISM.guarantee(70, delta=1e-6).epsilon
    assert [run["directories"] for run in result["runs"]] == [
        [str(one), str(copy)],
        [str(two)],
    ]


def test_noise_that_was_used_twice_leaves_no_epsilon(tmp_path, capsys):
    one, two = tmp_path / "one", tmp_path / "two"
    begin(one)
    begin(two, data="other")
    result = report(capsys, one, two)
    assert result["epsilon"] is None
    assert "the key key added the same noise" in result["notes"][0]
    text = text_of(capsys, one, two)
    assert "epsilon inf at delta 1e-05" in text
    assert "there is no finite epsilon" in text


def test_an_incomplete_record_is_reported_and_stays(tmp_path, capsys):
    begin(tmp_path)
    begin(tmp_path, start=30, stop=40)
    file = tmp_path / "ledger.jsonl"
    file.write_bytes(torn := file.read_bytes()[:-20])
    assert report(capsys, tmp_path)["runs"][0]["steps"] == 30
    assert "ends with an incomplete record of" in text_of(capsys, tmp_path)
    assert file.read_bytes() == torn


def test_a_damaged_ledger_is_refused(tmp_path, capsys):
    begin(tmp_path)
    begin(tmp_path, start=30, stop=40)
    file = tmp_path / "ledger.jsonl"
    file.write_bytes(file.read_bytes().replace(b'"start": 30', b'"start": 39'))
    assert "ledger.jsonl, line 2" in refusal(capsys, tmp_path)


def test_a_directory_without_a_readable_ledger_is_refused(tmp_path, capsys):
    assert "reason='there is none'" in refusal(capsys, tmp_path)
    (tmp_path / "ledger.jsonl").mkdir()
    assert "must have a ledger that can be read" in refusal(capsys, tmp_path)


def test_a_delta_must_be_given_where_there_is_not_one(tmp_path, capsys):
    begin(tmp_path, delta=None)
    assert "deltas=[]" in refusal(capsys, tmp_path)
    begin(tmp_path)
    assert report(capsys, tmp_path)["delta"] == 1e-5
    begin(tmp_path, delta=1e-6)
    assert "deltas=[1e-06, 1e-05]" in refusal(capsys, tmp_path)
    assert "delta must be in" in refusal(capsys, tmp_path, "--delta", "2")


def test_runs_with_different_neighbours_are_refused(tmp_path, capsys):
    one, two = tmp_path / "one", tmp_path / "two"
    begin(one)
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    begin(two, key="other", neighboring_relation=relation)
    assert "one neighbouring relation" in refusal(capsys, one, two)


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit):
        main(["ledger", "--help"])
    assert "python -m dpmp ledger runs/first" in capsys.readouterr().out
