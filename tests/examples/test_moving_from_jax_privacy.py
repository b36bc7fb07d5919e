"""That the example trains the same with jax_privacy and with dpmp."""

import re

import jax
import moving_from_jax_privacy as example
import pytest

STEPS = 20


def accuracies(run, capsys):
    """Runs the example; returns the accuracies by name, and what it prints."""
    run(example, "--steps", STEPS)
    printed = capsys.readouterr().out
    found = re.findall(r"^(\S.*?)  +[\d.]+ +(0\.\d+)$", printed, re.M)
    return {name: float(accuracy) for name, accuracy in found}, printed


@pytest.mark.slow
def test_without_jax_privacy_it_trains_with_dpmp_alone(run, monkeypatch, capsys):
    monkeypatch.setattr(example.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(
        example, "parts_of_jax_privacy", lambda _: pytest.fail("it was used")
    )
    found, printed = accuracies(run, capsys)
    assert list(found) == ["dpmp, in the same loop", "dpmp, with DPTrainer"]
    assert min(found.values()) > 0.7
    assert "jax_privacy is not installed" in printed


@pytest.mark.filterwarnings("default")  # those of other packages
def test_sums_of_both_are_equal_up_to_what_dpmp_reserves():
    pytest.importorskip("jax_privacy")
    with jax.numpy_dtype_promotion("standard"):  # jax_privacy needs it
        data = example.make_data(1, example.BATCH_SIZE)
        distances = dict(example.compare_sums(data))
    # docs/guarantees.md has the shares of the clip norm that are reserved. The rest is
    # the rounding of a sum of 200 float32 numbers.
    assert 0.005 < distances["float32"] < 0.0078
    assert distances["exact"] < 1e-3


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of other packages
def test_all_ways_learn(run, capsys):
    pytest.importorskip("jax_privacy")
    with jax.numpy_dtype_promotion("standard"):  # jax_privacy needs it
        found, _ = accuracies(run, capsys)
    assert len(found) == 3
    assert "jax_privacy" in found
    assert min(found.values()) > 0.7
