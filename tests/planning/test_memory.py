"""Memory, operations and microbatches, against known sizes and compiled programs."""

import pathlib

import jax
import jax.numpy as jnp
import optax
import pytest

from dpmp import DPSGD, DPTrainer, Policy, _timing
from dpmp.__main__ import main
from dpmp.planning import _compiled_memory
from dpmp.planning.memory import (
    CompiledMemory,
    accumulation_overhead,
    compiled_memory,
    estimate_memory,
    largest_microbatch,
    measure_accumulation_share,
)
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
    lines = _estimate(microbatch_size=4).by_name
    names = ("master parameters", "optimizer state", "sum of gradients")
    state = [lines[name] / _NUM_PARAMETERS for name in names]
    assert sum(state) == pytest.approx(16, abs=1e-4)  # and Adam's counter
    assert lines["batch"] == 4 * 32 * (256 + 8)


_ADAM_IN_BFLOAT16 = optax.adam(1e-3, mu_dtype=jnp.bfloat16)
_SECOND_IN_FLOAT32 = Policy.from_name("mixed_bfloat16", float32_paths=("second",))


@pytest.mark.parametrize(
    ("changed", "name", "num_bytes"),
    [
        ({}, "compute copy", 2 * (_NUM_PARAMETERS + 32 * (256 + 8))),
        ({"optimizer": _ADAM_IN_BFLOAT16}, "optimizer state", 6 * _NUM_PARAMETERS + 4),
        ({"policy": _WITHOUT_MASTERS}, "master parameters", 2 * _NUM_PARAMETERS),
        # The second array has its turn later.
        ({"policy": _WITHOUT_MASTERS}, "random bits", 16 * 256 * 512),
        ({"policy": _WITHOUT_MASTERS}, "compute copy", 2 * 32 * (256 + 8)),
        (
            {"policy": _SECOND_IN_FLOAT32},
            "compute copy",
            2 * (256 * 512 + 32 * (256 + 8)),
        ),
        (
            {"policy": _SECOND_IN_FLOAT32, "microbatch_size": 4},
            "per-example gradients",
            4 * (2 * 256 * 512 + 4 * 512 * 8),
        ),
        ({}, "per-example gradients", 32 * 2 * _NUM_PARAMETERS),
        ({"microbatch_size": 4}, "per-example gradients", 4 * 2 * _NUM_PARAMETERS),
        ({"policy": "float32"}, "per-example gradients", 32 * 4 * _NUM_PARAMETERS),
        ({"method": None}, "per-example gradients", None),
        ({"arithmetic": "float32"}, "sum of gradients", 4 * _NUM_PARAMETERS),
        ({"method": None}, "sum of gradients", 4 * _NUM_PARAMETERS),
    ],
)
def test_the_parts_have_the_sizes_of_their_shapes(changed, name, num_bytes):
    assert _estimate(**changed).by_name.get(name) == num_bytes


@pytest.mark.parametrize(
    ("changed", "moment"),
    [
        ({"microbatch_size": 4}, "clipping"),
        ({"method": None}, "noise"),
        ({"method": None, "policy": _WITHOUT_MASTERS}, "rounding"),
    ],
)
def test_the_total_is_what_is_in_memory_at_the_worst_moment(changed, moment):
    estimate = _estimate(**changed)
    assert estimate.moment == moment
    assert estimate.total == sum(
        line.num_bytes
        for line in estimate.lines
        if line.moment in ("throughout", moment)
    )


def test_the_guide_has_the_total_of_the_account():
    shapes = _shape(10**4, 10**3), _shape(2, 10)
    estimate = _estimate(*shapes, method="book_keeping")
    total = round(estimate.total / estimate.num_parameters)
    guide = pathlib.Path(__file__).parents[2] / "docs" / "precision.md"
    assert f"a step takes up to {total} bytes for each parameter" in guide.read_text()


def test_arrays_count_as_their_shapes():
    arrays = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (_MLP, _BATCH))
    assert _estimate() == _estimate(*arrays)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    ["mixed_bfloat16", "float32", _WITHOUT_MASTERS],
    ids=["mixed_bfloat16", "float32", "without masters"],
)
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
    trainer = DPTrainer(
        mechanism=DPSGD(
            num_examples=100,
            expected_batch_size=4,
            truncated_batch_size=4,
            iterations=1,
            l2_clip_norm=1.0,
            noise_multiplier=1.0,
            **options,
        ),
        loss_fn=model.loss,
        optimizer=optimizer,
        policy=Policy.from_name("mixed_bfloat16"),
    )
    analysis = trainer.lower(trainer.init(params), batch).compile().memory_analysis()
    options |= {"policy": "mixed_bfloat16", "optimizer": optimizer}
    compiled = compiled_memory(model.loss, params, batch, **options)
    assert compiled.temporary == pytest.approx(analysis.temp_size_in_bytes, rel=0.03)


def test_a_step_of_a_billion_parameters_compiles_and_is_not_allocated():
    shapes = _shape(10**9), _shape(2, 10**9)
    compiled = compiled_memory(_linear_loss, *shapes, microbatch_size=1, **_PLAIN)
    assert compiled.total > 4 * 10**9


def test_arrays_that_a_loss_closes_over_are_arguments():
    frozen = jnp.ones((512, 8))
    adapted = compiled_memory(
        lambda w, x: jnp.mean((x @ frozen @ w) ** 2),
        *(_shape(8), _shape(4, 512)),
        **_PLAIN,
    )
    assert adapted.arguments >= frozen.nbytes + 4 * 4 * 512


def test_a_compiler_that_reports_nothing_is_an_error(monkeypatch):
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda _: None)
    with pytest.raises(ValueError, match="the compiler must report the memory"):
        compiled_memory(_linear_loss, _shape(8), _shape(4, 8), **_PLAIN)


@pytest.mark.parametrize(
    ("num_bytes", "size"),
    [(900, 12), (400, 12), (399, 6), (300, 6), (299, 3), (200, 3), (199, None)],
)
def test_the_largest_microbatch_fits_and_the_next_one_does_not(
    num_bytes, size, monkeypatch
):
    def compiled(*args, microbatch_size, **options):
        assert (args, options) == ((_linear_loss, *shapes), _PLAIN)
        return CompiledMemory(50, 0, 0, {12: 350, 6: 250, 3: 150}[microbatch_size])

    shapes = _shape(64, 64), _shape(12, 64)
    monkeypatch.setattr(_compiled_memory, "compiled_memory", compiled)
    found = largest_microbatch(_linear_loss, *shapes, num_bytes=num_bytes, **_PLAIN)
    assert (found and found[0]) == size


def test_accumulation_counts_what_is_trained():
    sizes = {"batch_size": 8, "num_positions": 8 * 512}
    overhead = accumulation_overhead(_MLP, num_trainable=100, **sizes)
    assert overhead.training == 6 * 8 * 512 * _NUM_PARAMETERS
    assert overhead.accumulation == 4 * 8 * 100
    overhead = accumulation_overhead(1000, **sizes)
    assert overhead.share == pytest.approx(2 / (3 * 512))


def test_the_share_of_clipping_is_measured(monkeypatch):
    def in_turn(functions, rounds):
        assert rounds == 1
        jax.block_until_ready([run() for run in functions.values()])
        return {"plain": [2.0], "clipped": [3.0]}

    monkeypatch.setattr(_timing, "in_turn", in_turn)
    params, batch = jnp.zeros(4), _shape(8, 4)
    assert measure_accumulation_share(_linear_loss, params, batch, rounds=1) == 0.5


_SMALL = "--layers 1 --width 8 --heads 2 --length 4 --optimizer sgd"

_ONE = f"{_SMALL} --batch-size 1 --method per_example"


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ("--parameters 7000000000 --optimizer sgd", ["28000.00", "Clipped sums"]),
        (f"--fit-in 0.001 {_ONE}", ["per_example: A step with microbatches of 1 "]),
        (f"--fit-in 1e-9 {_ONE}", ["No microbatch fits"]),
        pytest.param(
            f"--compile --batch-size 8 --microbatch-size 2 {_SMALL}",
            ["per_example:", "book_keeping:", "Compiled for this device", "Clipped"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_command_counts_compiles_and_fits(options, texts, capsys):
    assert main(["memory", *options.split()]) == 0
    output = capsys.readouterr().out
    assert all(text in output for text in texts)
