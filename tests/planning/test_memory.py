"""Memory and microbatches, against known sizes and compiled programs."""

import pathlib

import jax
import jax.numpy as jnp
import optax
import pytest
from small_runs import new_trainer

from dpmp import Policy
from dpmp.planning import _compiled_steps
from dpmp.planning.memory import (
    CompiledMemory,
    compiled_memory,
    estimate_memory,
    largest_microbatch,
)
from dpmp.strategies import banded_toeplitz
from tests import models

_ADAM = optax.adam(1e-3)
_WITHOUT_MASTERS = Policy(jnp.bfloat16, jnp.bfloat16, stochastic_rounding=True)
_PLAIN = {"policy": "float32", "optimizer": optax.sgd(1), "arithmetic": "float32"}


def _shape(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


_MLP = {"first": _shape(256, 512), "second": _shape(512, 8)}
_BATCH = {"x": _shape(32, 256), "y": _shape(32, 8)}
_NUM_PARAMETERS = 256 * 512 + 512 * 8


def _estimate(params=_MLP, batch=_BATCH, **changed):
    options = {"policy": "mixed_bfloat16", "optimizer": _ADAM}
    options |= {"method": "per_example", **changed}
    return estimate_memory(params, batch, **options)


def _linear_loss(w, x):
    return jnp.mean((x @ w) ** 2)


def test_mixed_precision_with_adam_takes_16_bytes_for_a_parameter():
    arrays = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (_MLP, _BATCH))
    assert _estimate() == _estimate(*arrays)
    lines = _estimate(microbatch_size=4).by_name
    names = ("master parameters", "optimizer state", "sum of gradients")
    state = [lines[name] / _NUM_PARAMETERS for name in names]
    assert sum(state) == pytest.approx(16, abs=1e-4)  # and Adam's counter
    assert lines["batch"] == 4 * 32 * (256 + 8)


_ADAM_IN_BFLOAT16 = optax.adam(1e-3, mu_dtype=jnp.bfloat16)
_FOUR_BANDS = banded_toeplitz(4, iterations=10)
_IN_FLOAT32 = {
    "policy": Policy.from_name("mixed_bfloat16", float32_paths=("second",)),
    "microbatch_size": 4,
}


@pytest.mark.parametrize(
    ("changed", "name", "num_bytes"),
    [
        ({}, "compute copy", 2 * (_NUM_PARAMETERS + 32 * (256 + 8))),
        ({"optimizer": _ADAM_IN_BFLOAT16}, "optimizer state", 6 * _NUM_PARAMETERS + 4),
        ({"policy": _WITHOUT_MASTERS}, "master parameters", 2 * _NUM_PARAMETERS),
        # The second array has its turn later.
        ({"policy": _WITHOUT_MASTERS}, "random bits", 16 * 256 * 512),
        ({"policy": _WITHOUT_MASTERS}, "compute copy", 2 * 32 * (256 + 8)),
        (_IN_FLOAT32, "compute copy", 2 * (256 * 512 + 32 * (256 + 8))),
        (_IN_FLOAT32, "per-example gradients", 4 * (2 * 256 * 512 + 4 * 512 * 8)),
        ({}, "per-example gradients", 32 * 2 * _NUM_PARAMETERS),
        ({"method": None}, "per-example gradients", None),
        ({"arithmetic": "float32"}, "sum of gradients", 4 * _NUM_PARAMETERS),
        ({"method": None}, "sum of gradients", 4 * _NUM_PARAMETERS),
        ({"strategy": _FOUR_BANDS}, "earlier noise", 12 * _NUM_PARAMETERS),
        ({}, "earlier noise", None),
    ],
)
def test_the_parts_have_the_sizes_of_their_shapes(changed, name, num_bytes):
    assert _estimate(**changed).by_name.get(name) == num_bytes


def test_the_total_is_what_is_in_memory_at_the_worst_moment():
    for changed, moment in (
        ({"microbatch_size": 4}, "clipping"),
        ({"method": None}, "noise"),
        ({"method": None, "policy": _WITHOUT_MASTERS}, "rounding"),
    ):
        estimate = _estimate(**changed)
        assert estimate.moment == moment
        moments = "throughout", moment
        lines = [x for x in estimate.lines if x.moment in moments]
        assert estimate.total == sum(x.num_bytes for x in lines)


def test_the_guide_has_the_total_of_the_account():
    shapes = _shape(10**4, 10**3), _shape(2, 10)
    estimate = _estimate(*shapes, method="book_keeping")
    total = round(estimate.total / estimate.num_parameters)
    guide = pathlib.Path(__file__).parents[2] / "docs" / "precision.md"
    assert f"a step takes up to {total} bytes for each parameter" in guide.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", _WITHOUT_MASTERS], ids=str)
def test_the_account_is_within_10_percent_where_activations_are_few(policy):
    args = _shape(512, 64), _shape(32, 512)
    options = {
        "policy": policy,
        "optimizer": optax.sgd(0.1, momentum=0.9),
        "method": "per_example",
        "microbatch_size": 8,
    }
    compiled = compiled_memory(_linear_loss, *args, **options)
    assert estimate_memory(*args, **options).total == pytest.approx(
        compiled.total, rel=0.1
    )


@pytest.mark.slow
def test_the_step_is_that_of_a_trainer():
    options = {"method": "book_keeping", "microbatch_size": 2}
    model, optimizer = models.TRANSFORMER, optax.sgd(0.1)
    params, batch = model.init(jnp.float32), model.make_batch(0, 4)
    sizes = {"expected_batch_size": 4, "truncated_batch_size": 4, "sampling_prob": None}
    training = {"policy": "mixed_bfloat16", "optimizer": optimizer}
    trainer = new_trainer(loss_fn=model.loss, **training, **sizes, **options)
    analysis = trainer.lower(trainer.init(params), batch).compile().memory_analysis()
    options |= training
    compiled = compiled_memory(model.loss, params, batch, **options)
    assert compiled.temporary == pytest.approx(analysis.temp_size_in_bytes, rel=0.03)


def test_shapes_are_compiled_and_frozen_arrays_are_arguments(monkeypatch):
    shapes = _shape(10**9), _shape(2, 10**9)
    compiled = compiled_memory(_linear_loss, *shapes, microbatch_size=1, **_PLAIN)
    assert compiled.total > 4 * 10**9  # which was not allocated
    frozen = jnp.ones((512, 8))

    def loss(w, x):
        return jnp.mean((x @ frozen @ w) ** 2)

    shapes = _shape(8), _shape(4, 512)
    compiled = compiled_memory(loss, *shapes, **_PLAIN)
    assert compiled.arguments >= frozen.nbytes + 4 * 4 * 512
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda _: None)
    with pytest.raises(ValueError, match="the compiler must report the memory"):
        compiled_memory(loss, *shapes, **_PLAIN)


@pytest.mark.parametrize(
    ("num_bytes", "size"), [(400, 12), (399, 6), (300, 6), (200, 3), (199, None)]
)
def test_the_largest_microbatch_fits_and_the_next_one_does_not(
    num_bytes, size, monkeypatch
):
    def compiled(*args, microbatch_size, **options):
        assert (args, options) == ((_linear_loss, *shapes), _PLAIN)
        return CompiledMemory(50, 0, 0, {12: 350, 6: 250, 3: 150}[microbatch_size])

    shapes = _shape(64, 64), _shape(12, 64)
    monkeypatch.setattr(_compiled_steps, "compiled_memory", compiled)
    found = largest_microbatch(_linear_loss, *shapes, num_bytes=num_bytes, **_PLAIN)
    assert (found and found[0]) == size
