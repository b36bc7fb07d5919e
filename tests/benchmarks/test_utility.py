"""Accuracy at equal epsilon: every library trains the same network."""

import importlib.util

import jax
import numpy as np
import pytest

from benchmarks import utility


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of jax_privacy
@pytest.mark.parametrize("library", utility.LIBRARIES)
def test_every_library_trains_or_is_named_as_missing(library):
    with jax.numpy_dtype_promotion("standard"):  # as jax_privacy needs it
        (line,) = utility.benchmark("digits", 3.0, library, seeds=1, steps=2)
    if importlib.util.find_spec(library.lower()):
        assert 0 < line["accuracy"][0] < 1
    else:
        assert f"pip install {library.lower()}" in line["remark"]


@pytest.mark.skipif(not importlib.util.find_spec("opacus"), reason="needs Opacus")
def test_the_models_of_torch_are_the_same():
    import torch

    from benchmarks import in_pytorch

    _, batch = utility.digits(0)
    for make in (utility.network, utility.linear):
        params = make(64, 0)
        found = in_pytorch.classifier(params)(torch.from_numpy(batch["features"]))
        expected = utility.logits(params, batch["features"])
        np.testing.assert_allclose(found.detach(), expected, rtol=1e-4, atol=1e-5)
