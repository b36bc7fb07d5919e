"""The report says what the ledger says, and opens as it is."""

import dataclasses
import json
import math
import pathlib
import re

import dp_accounting
import numpy as np
import pytest
from ledgers import MECHANISM, charged

import dpmp
from dpmp.__main__ import main
from dpmp.runs._files import digest_of_tree
from dpmp.runs._ledger import Ledger
from dpmp.tools.report import report_of
from dpmp.tools.report_pages import as_html, success


@pytest.fixture
def directory(tmp_path):
    ledger = Ledger(tmp_path)
    record = charged(0, 4)
    ledger.append(
        dataclasses.replace(record, event="released", nonce="n", digest="<digest>")
    )
    return tmp_path


@pytest.fixture
def files(directory, capsys):
    def write(*options):
        output = directory / "out"
        command = ["report", str(directory), "--output", str(output), *options]
        status = main(command)
        names = ["privacy.json", "privacy.html", "privacy.md"]
        *paths, remarks = capsys.readouterr().out.split("\n", len(names))
        assert paths == [str(output / x) for x in names]
        assert status == bool(remarks)
        texts = [(output / x).read_text() for x in names]
        assert json.loads(texts[0])["remarks"] == remarks.splitlines()
        assert all(x in text for x in remarks.splitlines() for text in texts[1:])
        return *texts, remarks

    return write


def test_all_documents_have_the_epsilon_of_the_ledger(directory, files, capsys):
    assert main(["ledger", str(directory), "--json"]) == 0
    ledger = json.loads(capsys.readouterr().out)
    content, page, card, remarks = files()
    assert not remarks
    report = json.loads(content)
    ledger["directories"][0]["directory"] = directory.name
    assert {name: report[name] for name in ledger} == ledger
    assert str(directory) not in content
    (point,) = (x for x in report["curve"] if math.isclose(x["delta"], 1e-5))
    assert point["epsilon"] == pytest.approx(report["epsilon"])
    for text in (page, card):
        assert f"epsilon {math.ceil(1e3 * report['epsilon']) / 1e3:.3f}" in text
    assert not re.search("(src|href)=", page)  # it opens without a network
    assert "&lt;digest&gt;" in page
    assert "4 steps with noise multiplier" in card


def test_bounds_on_attacks_are_those_of_epsilon_and_delta(files):
    report = json.loads(files()[0])
    curve = [(x["delta"], x["epsilon"]) for x in report["curve"]]
    for x in report["attacks"]:
        rate, most = x["false_positive_rate"], x["true_positive_rate_at_most"]
        assert rate < most < 1
        assert most <= math.exp(report["epsilon"]) * rate + report["delta"]
    rates = [success(curve, x / 50) for x in range(51)]
    assert rates == sorted(rates)
    assert rates[-1] == 1
    assert success([], 0.3) == 1
    assert success([(0.0, 0.0)], 0.3) == pytest.approx(0.3)
    assert success([(1e-5, math.log(3))], 0.5) == pytest.approx(5 / 6, abs=1e-4)


def test_checks_are_counted(directory, files):
    path = directory / "checks.json"
    bound = {"subject": "canaries", "epsilon": 2.8, "claimed": 4.0}
    results = [bound | {"passed": True}, {"passed": False}]
    path.write_text(json.dumps({"device": "a <b>", "results": results}))
    about = ["--about", "A <small> model,\nfor a|b"]
    content, page, card, remarks = files("--checks", str(path), *about)
    assert json.loads(content)["checks"][0]["passed"] == 1
    assert remarks == "A CHECK FAILED, see checks.json: the claim may be false.\n"
    assert "A &lt;small&gt; model, for a|b" in page
    assert r"| What was trained | A <small> model, for a\|b |" in card
    assert "Checks in checks.json, on a &lt;b&gt;" in page
    assert "1 of 2 hold: canaries: epsilon at least 2.800, claimed 4.000" in page


def test_an_audit_that_cannot_fail_is_not_counted(directory, files):
    losses, is_in = np.arange(64.0), np.arange(64) % 2 == 0
    claims = {"claimed": 1.0}, {"claimed": 8.0}
    sound, found = (
        dpmp.audit.memorization(losses, is_in, delta=1e-5, **x) for x in claims
    )
    path = directory / "memory.json"
    dpmp.audit.save(path, memorization=sound)
    assert json.loads(files("--checks", str(path))[0])["checks"][0]["passed"] == 1
    found = dataclasses.replace(found, exposure=(1.0, [math.nan]))  # JSON has none
    dpmp.audit.save(path, memorization=found)
    content, page, *_ = files("--checks", str(path))
    assert json.loads(content)["checks"][0]["number"] == 0
    assert "none can fail: memorization: epsilon at least" in page
    assert f"so few canaries show {found.largest_epsilon:.3f} at most" in page


@pytest.mark.parametrize("changed", [None, False, True])
def test_the_files_of_a_checkpoint_are_compared_with_its_hash(
    directory, files, changed
):
    checkpoint = directory / "checkpoints" / "4"
    if changed is not None:
        checkpoint.mkdir(parents=True)
        (checkpoint / "array").write_bytes(b"12")
        record = dataclasses.replace(
            charged(0, 4),
            event="released",
            nonce="m",
            digest=digest_of_tree(checkpoint),
        )
        Ledger(directory).append(record)
    if changed:
        (checkpoint / "array").write_bytes(b"13")
    content, page, _, remarks = files()
    found = json.loads(content)["checkpoints"][directory.name]["files_have_it"]
    assert found is (None if changed is None else not changed)
    assert ("WHICH ITS FILES DO NOT HAVE" in page) == bool(changed)
    assert ("ANOTHER CHECKPOINT: the files after step 4" in remarks) == bool(changed)


@pytest.mark.parametrize("is_same", [True, False])
def test_a_check_says_whether_it_attacked_the_mechanism_of_the_runs(
    is_same, directory, files
):
    audited = MECHANISM
    if not is_same:
        audited = dataclasses.replace(MECHANISM, noise_multiplier=9.0)
    path = directory / "audit.json"
    dpmp.audit.save(path, batches=dpmp.audit.batches(audited, num_batches=9))
    content, page, *_ = files("--checks", str(path))
    assert json.loads(content)["checks"][0]["of_these_runs"] == is_same
    assert ("WITH ANOTHER MECHANISM" in page) == (not is_same)
    assert (", with the mechanism of these runs" in page) == is_same


def test_a_delta_that_is_too_large_for_the_data_is_the_first_that_is_read(files):
    remarks = files("--delta", "0.001")[-1]
    assert remarks.startswith("DELTA IS TOO LARGE: publishing one of the 1000 exa")


def test_a_run_without_noise_is_not_called_private(directory, files):
    plain = MECHANISM.without_privacy()
    Ledger(directory).append(charged(4, 5, mechanism=plain))
    content, page, card, remarks = files()
    assert remarks.startswith("NO PRIVACY IS CLAIMED")
    assert json.loads(content)["epsilon"] is None
    for text in (page, card):
        assert "Trained without a claim of differential privacy" in text
        assert "Trained with differential privacy" not in text
        assert "per-example clipping" not in text


def test_a_report_from_inside_a_directory_has_its_name(directory, monkeypatch):
    monkeypatch.chdir(directory)
    assert report_of([pathlib.Path()])["num_examples"] == {directory.name: 1000}


@pytest.mark.parametrize("relation", dp_accounting.NeighboringRelation)
def test_the_number_of_examples_is_shown_unless_it_is_protected(relation, tmp_path):
    is_protected = relation is dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    size = 12345
    fields = {
        "num_examples": size,
        "neighboring_relation": relation,
        "sampling_prob": 1.0,
    }
    mechanism = dataclasses.replace(MECHANISM, **fields)
    Ledger(tmp_path).append(charged(0, 4, mechanism=mechanism))
    report = report_of([tmp_path])
    assert report["num_examples"] == {tmp_path.name: None if is_protected else size}
    assert (str(size) in as_html(report)) != is_protected


def test_wrong_files_are_refused(directory, refusal):
    file = directory / "file"
    for content in ("{", "[]", '{"device": 1}', '{"results": 3}'):
        file.write_text(content)
        said = refusal("report", directory, "--checks", file)
        assert "must be files that selfcheck or audit" in said
    said = refusal("report", directory, directory)
    assert "must have different names" in said
    assert "must be written" in refusal("report", directory, "--output", file)
    for wrong in ({}, {"losses": 1.0}):
        with pytest.raises(ValueError, match="must be results of"):
            dpmp.audit.save(file, **wrong)
