"""Whole steps next to each other: they are the same step, and nothing goes missing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import models, side_by_side, steps
from benchmarks.harness import Measured
from benchmarks.models import SUBJECTS

_HEADS, _VOCABULARY = 2, 11
_SHAPE = {"length": 6, "width": 8, "depth": 2, "vocabulary": _VOCABULARY}


def test_ratios_are_taken_within_rounds():
    seconds = {
        "plain": [1.0, 10.0, 4.0],
        "without privacy, 8": [0.5, 5.0, 2.0],
        "jax_privacy, at once": [2.0, 20.0, 8.0],
        "jax_privacy, 8": [1.5, 15.0, 6.0],
        "dpmp, 4": [3.0, 30.0, 12.0],
    }
    figures = side_by_side.compare(Measured(seconds))
    over = {what: ratios["dpmp, 4"] for what, ratios in figures["time_over"].items()}
    assert over == {
        "plain": 3.0,
        "fastest plain": 6.0,
        "jax_privacy, at once": 1.5,
        "jax_privacy, best": 2.0,
    }
    assert figures["milliseconds"]["dpmp, 4"] == 12e3
    assert figures["range"]["dpmp, 4"] == [3e3, 30e3]
    assert figures["best"] == {
        "fastest plain": "without privacy, 8",
        "jax_privacy, best": "jax_privacy, 8",
    }


def test_a_library_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(side_by_side, "missing", lambda: ["torch_of_nowhere"])
    absent = side_by_side.absent(SUBJECTS["tiny"])
    assert "torch_of_nowhere" in absent["torch, Opacus"]
    names = side_by_side.contenders(SUBJECTS["tiny"], "float32", 16)
    assert not [name for name in names if "Opacus" in name]
    assert "PyTorch" in side_by_side.absent(SUBJECTS["cnn"])["torch, Opacus"]


def test_what_a_library_refuses_is_recorded_and_the_others_run(monkeypatch):
    def refuses():
        raise RuntimeError("no such layer")

    def runs():
        return steps.Step(lambda: jnp.ones(3))

    made = {"plain": runs, "jax_privacy, at once": refuses}
    monkeypatch.setattr(side_by_side, "contenders", lambda *_: made)
    (figures,) = side_by_side.benchmark("tiny", "float32", 16, 1)
    assert figures["refused"] == {"jax_privacy, at once": "RuntimeError: no such layer"}
    assert [*figures["milliseconds"]] == ["plain"]


@pytest.fixture(scope="module")
def task():
    return models.transformer(jnp.float32, 3, heads=_HEADS, **_SHAPE)


@pytest.mark.skipif(bool(side_by_side.missing()), reason="needs torch and Opacus")
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.filterwarnings("default")  # those of torch
def test_the_step_of_opacus_clips_the_same_gradients(task, mode):
    import torch

    from benchmarks import in_pytorch

    params, tokens = jax.tree.map(np.asarray, (task.params, task.batch["tokens"]))
    model, optimizer, loss_fn = in_pytorch.trainer(
        params, tokens, _HEADS, mode, noise_multiplier=0.0, optimizer="SGD"
    )
    inputs = torch.from_numpy(tokens.astype(np.int64))
    shape = {"shape": inputs[:, 1:].shape} if mode == "ghost" else {}
    logits = model(inputs)[:, :-1].reshape(-1, _VOCABULARY)
    loss = loss_fn(logits, inputs[:, 1:].reshape(-1), **shape)
    loss.backward()
    optimizer.step()
    assert loss.item() == pytest.approx(float(task.loss_fn(task.params, task.batch)))
    theirs = dict(model.named_parameters())
    for name, ours in _clipped_mean(task).items():
        grad = theirs[f"_module.{name}"].grad.numpy()
        np.testing.assert_allclose(grad, ours, rtol=1e-4, atol=1e-6)


def _clipped_mean(task):
    """Some arrays of the mean of the clipped gradients, under their names in torch."""

    def clipped(tokens):
        grads = jax.grad(task.loss_fn)(task.params, {"tokens": tokens[None]})
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda g: g / jnp.maximum(norm, 1), grads)

    mean = jax.tree.map(lambda g: g.mean(0), jax.vmap(clipped)(task.batch["tokens"]))
    return {
        "head.weight": mean["head"].T,
        "embed.weight": mean["embed"],
        "position.weight": mean["position"],
        "blocks.1.qkv.weight": mean["blocks"][1]["qkv"].T,
        "blocks.0.norms.1.weight": mean["blocks"][0]["norms"][1],
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of torch
def test_a_contender_of_every_library_runs(monkeypatch):
    pytest.importorskip("jax_privacy")
    monkeypatch.setattr(side_by_side, "_DPMP", {("book_keeping", "bounded"): (8,)})
    monkeypatch.setattr(side_by_side, "_JAX_PRIVACY", (None,))
    wanted = set(side_by_side.contenders(SUBJECTS["tiny"], "bfloat16", 16))
    assert {"plain", "jax_privacy, at once", "dpmp book_keeping bounded, 8"} <= wanted
    with jax.numpy_dtype_promotion("standard"):  # as users have it
        (figures,) = side_by_side.benchmark("tiny", "bfloat16", 16, 1)
    assert figures["refused"] == {}
    assert set(figures["milliseconds"]) == wanted
