"""The guide "KerasHub and Gemma": its code runs.

A library that is not installed is skipped: each of them brings TensorFlow.
"""

import os
import pathlib
import re
import types

import jax
import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "jax")

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "model_libraries.md"
MODULES = {"KerasHub": "keras_hub", "Gemma": "gemma"}

pytestmark = pytest.mark.filterwarnings("default")  # those of the libraries


@pytest.fixture(autouse=True)
def _promotion_of_models():
    with jax.numpy_dtype_promotion("standard"):
        yield


def recipe(title):
    """The names that the code of a section defines."""
    start, *sections = PAGE.read_text().split("\n## ")
    text = next(x for x in sections if x.startswith(title + "\n"))
    code = "\n".join(re.findall(r"```py\n(.*?)```", start + text, re.S))
    namespace = {"__name__": title}
    exec(compile(code, title, "exec"), namespace)
    return types.SimpleNamespace(**namespace)


@pytest.fixture(params=MODULES)
def title(request):
    pytest.importorskip(MODULES[request.param], reason="see docs/model_libraries.md")
    return request.param


def test_the_recipe_trains_the_targets_alone(title):
    run = recipe(title)
    assert run.trainer.guarantee(run.state).epsilon <= 8.0
    targets = {path for path, _ in run.adapters.axes}
    merged = dict(jax.tree.leaves_with_path(run.merged))
    for path, before in jax.tree.leaves_with_path(run.params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        assert merged[path].dtype == before.dtype
        assert np.array_equal(merged[path], before) == (name not in targets)
