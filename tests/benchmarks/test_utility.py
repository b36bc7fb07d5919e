"""Accuracy at equal epsilon: every library trains the same network."""

import importlib.util
import json

import jax
import numpy as np
import pytest

from benchmarks import utility


@pytest.mark.filterwarnings("default")  # those of jax_privacy
def test_there_is_a_line_for_every_library(tmp_path):
    with jax.numpy_dtype_promotion("standard"):  # as jax_privacy needs it
        utility.measure("digits", 3.0, seeds=1, steps=2, out=tmp_path)
    lines = (tmp_path / "utility.jsonl").read_text().splitlines()
    found = {line["library"]: line for line in map(json.loads, lines)}
    assert found.keys() == utility.contenders().keys()
    assert all(0 < line["accuracy"][0] < 1 for line in found.values())


@pytest.mark.skipif(not importlib.util.find_spec("opacus"), reason="needs Opacus")
def test_the_network_of_torch_is_the_same():
    import torch

    from benchmarks import utility_opacus

    _, batch = utility.load(utility.IMAGES["digits"], 0)
    params = utility.initial_params(64, 0)
    found = utility_opacus.make_module(params)(torch.from_numpy(batch["image"]))
    expected = utility.logits(params, batch["image"])
    np.testing.assert_allclose(found.detach(), expected, rtol=1e-4, atol=1e-5)
