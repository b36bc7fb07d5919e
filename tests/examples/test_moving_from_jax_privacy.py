"""That the example trains the same with jax_privacy and with dpmp."""

import re

import jax
import moving_from_jax_privacy as example
import pytest


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
@pytest.mark.parametrize("is_installed", [True, False])
def test_all_ways_learn(is_installed, run, monkeypatch, capsys):
    pytest.importorskip("jax_privacy")
    if not is_installed:
        monkeypatch.setattr(example.importlib.util, "find_spec", lambda name: None)
    with jax.numpy_dtype_promotion("standard"):  # jax_privacy needs it
        run(example, "--steps", 20)
    found = re.findall(r"  +[\d.]+ +(0\.\d+)$", capsys.readouterr().out, re.M)
    assert len(found) == 2 + is_installed
    assert min(map(float, found)) > 0.7
