"""That texts are private with the counts, and that measures are what they say."""

import json
import os
import pathlib
import re

import jax
import numpy as np
import pytest
import synthetic_measures as measures
import synthetic_text as example
from labelled_records import private_and_held_out

from dpmp.__main__ import main as dpmp_command

LABELS = ["in", "the"]


@pytest.fixture
def records(tmp_path):
    """Texts of two labels, three of one in four."""
    path = tmp_path / "records.jsonl"
    rows = [{"label": LABELS[i % 4 > 0], "text": f"he {i} cab"} for i in range(400)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def flags(llama, records, tmp_path):
    return ("--model", llama, "--data", records, "--output", tmp_path / "out",
            "--labels", *LABELS, "--prompt", "{label}", "--delta", "1e-4",
            "--steps", "2", "--batch-size", "16", "--length", "26",
            "--num-texts", "8", "--copies", "2")  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*steps of another mechanism")  # the counts
@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")  # flax needs it
def test_one_guarantee_covers_texts_and_counts(run, tmp_path, flags, capsys):
    run(example, *flags)
    printed, out = capsys.readouterr().out, tmp_path / "out"
    report = json.loads((out / "report.json").read_text())
    assert 7.99 < report["epsilon"] <= 8
    assert report["delta"] == 1e-4
    assert report["statement"] in printed
    assert "texts and the counts together are (8.000, 0.0001)-diff" in printed

    dpmp_command(["ledger", str(out / "privacy" / "shared_runs"), "--json"])
    ledger = json.loads(capsys.readouterr().out)
    assert ledger["epsilon"] == report["epsilon"]
    assert ledger["delta"] == 1e-4
    steps = {x["sampling_prob"]: x["number"] for x in ledger["directories"][0]["steps"]}
    num_examples = report["num_examples"]
    assert steps == {1.0: 2, 16 / num_examples: 2}

    num_private = 400 - report["held_out_records"]
    assert num_examples == num_private + 2 * example.NUM_CANARIES
    counts, stddev = report["noisy_label_counts"], report["shared_runs"]["stddevs"][0]
    deviation = sum(counts.values()) - num_examples
    assert 0 < abs(deviation) < 9 * stddev * num_examples
    texts = [json.loads(x) for x in (out / "synthetic.jsonl").read_text().splitlines()]
    assert [x["label"] for x in texts] == example.labels_of_texts(
        LABELS, np.array([*counts.values()]), 8
    )
    for path in filter(pathlib.Path.is_file, out.rglob("*")):
        assert not re.search(rb"he \d+ cab", path.read_bytes()), path

    models, exact = {"before", "private"}, report["not_protected"]
    assert {x: {*y} for x, y in exact.items()} == {
        "nats_per_token": models, "accuracy": models, "shared_runs": {"held out"}
    }  # fmt: skip
    assert [len(x) for x in report["exposures"].values()] == [example.NUM_CANARIES] * 2
    assert (out / "report.png").stat().st_size > 10_000
    with pytest.raises(SystemExit, match="--output must be a new directory"):
        run(example, *flags)


@pytest.mark.filterwarnings("ignore:.*steps of another mechanism")
@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")  # flax needs it
def test_a_model_without_privacy_is_compared(run, tmp_path, flags, capsys):
    run(example, *flags, "--compare", "--copies", "0")
    assert "without any protection" in capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    exact, models = report["not_protected"], {"before", "private", "without privacy"}
    assert "exposures" not in {*report, *exact}
    assert {*exact["nats_per_token"]} == models
    assert {*exact["accuracy"]} == models | {"real texts"}
    assert {*exact["shared_runs"]} == {"held out", "without privacy"}
    assert len(report["shared_runs"]["shares"]) == len(measures.RUNS)
    assert report["num_examples"] == 400 - report["held_out_records"]

    # What was released is read again, and nothing is paid for twice.
    (tmp_path / "out" / "report.json").unlink()
    run(example, *flags, "--copies", "0")
    again = json.loads((tmp_path / "out" / "report.json").read_text())
    for name in ("epsilon", "noisy_label_counts"):
        assert again[name] == report[name]
    losses = exact["nats_per_token"], again["not_protected"]["nats_per_token"]
    assert losses[0]["private"] == losses[1]["private"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--data", "nowhere.jsonl"], "--data and --held-out must be .jsonl files"),
        (["--held-out", os.devnull], r"got 400 and 0\. Pass more"),
        (["--data", __file__], r"test_synthetic_text.py:1: must be a JSON object"),
        (["--labels", "in"], r"records.jsonl:2: the label must be one of .*\(in\)"),
        (["--prompt", "none"], "--prompt must have {label} in it; got 'none'"),
        (["--length", "9"], "--length must be at least 23 for canaries; got 9"),
        (["--delta", "0.1"], "--delta must be below 1 / "),
        (["--model", "nowhere"], "nowhere"),
    ],
)
@jax.numpy_dtype_promotion("standard")  # flax needs it
def test_bad_flags_stop_it_before_any_count(run, monkeypatch, flags, more, message):
    monkeypatch.setattr(example.Plan, "histogram", lambda *_: pytest.fail("it counted"))
    with pytest.raises((SystemExit, ValueError, FileNotFoundError), match=message):
        run(example, *flags, *more)


def test_shared_runs_depend_on_each_record_alone():
    words = [str(i) for i in range(20)]
    texts = [("ham", " ".join(words)), ("spam", "one two three")]
    records = [("ham", "x, " + " ".join(words[:n]).upper()) for n in (3, 4, 15, 16)]
    assert measures.shared_runs(records, texts).tolist() == [0, 1, 2, 3]
    assert measures.shared_runs(records[2:], texts).tolist() == [2, 3]
    assert measures.shares_of(records, texts) == [0.75, 0.5, 0.25]


def test_the_noise_of_shares_is_that_of_several_counts():
    counts = np.array([600, 200, 150, 50])
    noise = np.random.default_rng(0).normal(scale=5, size=(4000, 4))
    stddevs = np.std([measures.shares_reached(counts + x) for x in noise], axis=0)
    shares = measures.shares_reached(counts)
    expected = measures.stddevs_of_shares(shares, 5 / sum(counts))
    assert stddevs == pytest.approx(expected, rel=0.06)


def test_exposures_of_a_model_without_privacy_are_not_protected():
    scores = {"accuracy": 0.5, "exposures": [1.0]}
    models = dict.fromkeys(("before", "private", "without privacy"), scores)
    protected, others = example.divide(models)
    assert protected == {"exposures": {"before": [1.0], "private": [1.0]}}
    assert others["exposures"] == {"without privacy": [1.0]}
    assert {*others["accuracy"]} == {*models}


def test_public_records_can_be_evaluated_on_in_place_of_private_ones(records, tmp_path):
    public = tmp_path / "public.jsonl"
    public.write_text('{"label": "in", "text": "a cab"}\n')
    private, held_out = private_and_held_out(records, public, LABELS)
    assert len(private) == 400
    assert held_out == [("in", "a cab")]


def test_exposure_is_the_rank_of_a_canary_in_bits():
    nats = np.arange(measures.NUM_CODES) + 0.5
    nats[:2] = 0, 130.6  # below all others, and above 129 of them
    expected = [8, np.log2(256 / 130)]
    assert measures.exposures(nats, 2) == pytest.approx(expected, abs=0.01)
    texts = measures.canaries(0)
    assert len(set(texts)) == measures.NUM_CODES
    assert len({len(x) for x in texts}) == 1


def test_accuracy_is_that_of_a_classifier_on_words():
    train = [("spam", "buy cheap now"), ("ham", "see you at lunch")] * 3
    test = [("spam", "cheap cheap"), ("ham", "lunch"), ("ham", "at lunch")]
    assert measures.accuracy(train, test) == 1
    assert measures.accuracy([("spam", x) for _, x in train], test) == 0.5


def test_labels_are_as_frequent_as_the_counts_say():
    labels = example.labels_of_texts(["a", "b", "c"], np.array([30.0, -2, 10]), 8)
    assert labels == ["a"] * 6 + ["c"] * 2
