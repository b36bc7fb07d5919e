"""The guide "KerasHub and Gemma": its code runs, and its losses are clipped exactly.

A library that is not installed is skipped: each of them brings TensorFlow.
"""

import dataclasses
import functools
import os
import pathlib
import re
import types

import jax
import numpy as np
import pytest

import dpmp
from dpmp import lora

os.environ.setdefault("KERAS_BACKEND", "jax")

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "model_libraries.md"
MODULES = {"KerasHub": "keras_hub", "Gemma": "gemma"}

pytestmark = pytest.mark.filterwarnings("default")  # those of the libraries


@pytest.fixture(autouse=True)
def _promotion_of_models():
    with jax.numpy_dtype_promotion("standard"):
        yield


def small(config):
    """A small model with all kinds of layers of Gemma 3."""
    return dataclasses.replace(
        config,
        num_embed=13,
        embed_dim=16,
        hidden_dim=32,
        head_dim=8,
        attention_types=config.attention_types[4:6],
        sliding_window_size=4,
    )


# Replacements in the code of the page.
IN_FLOAT32 = {
    '"bfloat16"': '"float32"',
    "mixed_bfloat16": "float32",
    "gm.testing.DummyGemma()": "gm.nn.Gemma3_270M(config=small("
    "gm.nn.Gemma3_270M.config), dtype=np.float32)",
    "trainer.fit(": "(lambda state, data: state)(",
}


@functools.cache
def recipe(title, in_float32=False):
    """The names that the code of a section defines; in float32, it does not train."""
    start, *sections = PAGE.read_text().split("\n## ")
    text = next(x for x in sections if x.startswith(title + "\n"))
    code = "\n".join(re.findall(r"```py\n(.*?)```", start + text, re.S))
    for old, new in IN_FLOAT32.items() if in_float32 else ():
        code = code.replace(old, new)
    namespace = {"__name__": title, "small": small}
    exec(compile(code, title, "exec"), namespace)
    return types.SimpleNamespace(**namespace)


@pytest.fixture(params=MODULES)
def title(request):
    pytest.importorskip(MODULES[request.param], reason="see docs/model_libraries.md")
    return request.param


def without_key(run):
    """The loss, with the same dropout for all examples."""
    if "key" not in run.loss_fn.__code__.co_varnames:
        return run.loss_fn
    return lambda params, batch: run.loss_fn(params, batch, run.key)


def test_every_parameter_has_a_rule(title):
    run = recipe(title, in_float32=True)
    loss_fn = without_key(run)
    for fun, params in [
        (loss_fn, run.params),
        (lora.apply(loss_fn, run.params), run.adapters),
    ]:
        summary = dpmp.book_keeping.summarize(
            fun, params, run.data, arithmetic="bounded"
        )
        for row in summary.rows:
            assert row.rules, row
            assert "identity" not in row.rules, row
            assert "parameters" not in row.forms, row


def test_the_recipe_trains_the_targets_alone(title):
    run = recipe(title)
    assert run.trainer.guarantee(run.state).epsilon <= 8.0
    targets = {path for path, _ in run.adapters.axes}
    merged = dict(jax.tree.leaves_with_path(run.merged))
    for path, before in jax.tree.leaves_with_path(run.params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        assert merged[path].dtype == before.dtype
        assert np.array_equal(merged[path], before) == (name not in targets)
