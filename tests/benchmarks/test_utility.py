"""Accuracy at equal epsilon: every library trains the same network."""

import importlib.util

import jax
import numpy as np
import pytest

from benchmarks import utility


@pytest.mark.filterwarnings("default")  # those of jax_privacy
def test_there_is_a_line_for_every_library():
    with jax.numpy_dtype_promotion("standard"):  # as jax_privacy needs it
        lines = [*utility.measure("digits", 3.0, seeds=1, steps=2)]
    found = {line["library"]: line for line in lines}
    assert found.keys() == utility.contenders().keys()
    assert all(0 < line["accuracy"][0] < 1 for line in found.values())


@pytest.mark.skipif(not importlib.util.find_spec("opacus"), reason="needs Opacus")
def test_the_network_of_torch_is_the_same():
    import torch

    from benchmarks import in_pytorch

    _, batch = utility.load(utility.IMAGES["digits"], 0)
    params = utility.initial_params(64, 0)
    found = in_pytorch.digits_module(params)(torch.from_numpy(batch["image"]))
    expected = utility.logits(params, batch["image"])
    np.testing.assert_allclose(found.detach(), expected, rtol=1e-4, atol=1e-5)
