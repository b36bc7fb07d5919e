"""That the example of logistic regression is what it says it is."""

import re

import logistic_regression as example
import numpy as np
import pytest


def test_no_patient_changes_how_another_one_is_prepared(monkeypatch):
    """Subtracting the mean of the data, for example, would do so."""
    table = example.sklearn.datasets.load_breast_cancer()
    before = example.load()["x"]
    table.data[0] *= 100
    monkeypatch.setattr(example.sklearn.datasets, "load_breast_cancer", lambda: table)
    after = example.load()["x"]
    np.testing.assert_array_equal(after[1:], before[1:])
    assert not np.array_equal(after[0], before[0])
    assert np.max(np.abs(after)) <= 1


def test_splits_differ_and_have_each_patient_once():
    data = {"x": np.arange(569), "y": np.arange(569)}
    first, second = (example.split(data, seed) for seed in (0, 1))
    for train, held_out in (first, second):
        assert len(held_out["x"]) == example.HELD_OUT
        both = np.concatenate([train["x"], held_out["x"]])
        np.testing.assert_array_equal(np.sort(both), np.arange(569))
        np.testing.assert_array_equal(train["x"], train["y"])
    assert set(first[1]["x"]) != set(second[1]["x"])


@pytest.mark.slow
def test_it_prints_the_statement_and_learns(run, capsys):
    run(example, "--runs", 2)
    printed = capsys.readouterr().out
    assert "are (1.000, 0.0001)-differentially private" in printed
    found = re.findall(r"(0\.\d+) \+- \S+  with(?:out| epsilon)", printed)
    private, ordinary = map(float, found)
    # Guessing the more frequent label is right for 0.63 of the patients.
    assert private > 0.8
    assert ordinary > 0.9


def test_one_run_is_refused(run, capsys):
    with pytest.raises(SystemExit):
        run(example, "--runs", 1)
    assert "--runs must be at least 2" in capsys.readouterr().err
