"""The account of a step's memory, against known sizes and what programs compile to."""

import pathlib

import jax
import jax.numpy as jnp
import optax
import pytest

from dpmp import DPSGD, DPTrainer, Policy
from dpmp.__main__ import main
from dpmp.tools import _timing
from dpmp.tools.memory import (
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


def _shape(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


_MLP = {"first": _shape(256, 512), "second": _shape(512, 8)}
_BATCH = {"x": _shape(32, 256), "y": _shape(32, 8)}
_NUM_PARAMETERS = 256 * 512 + 512 * 8


def _estimate(params=_MLP, batch=_BATCH, **changed):
    options = {"policy": "mixed_bfloat16", "optimizer": _ADAM, **changed}
    return estimate_memory(params, batch, **options)


def _linear_loss(w, x):
    return jnp.mean((x @ w) ** 2)


def test_mixed_precision_with_adam_takes_16_bytes_for_a_parameter():
    lines = _estimate(microbatch_size=4).by_name
    names = ("master parameters", "optimizer state", "sum of gradients")
    state = [lines[name] / _NUM_PARAMETERS for name in names]
    assert sum(state) == pytest.approx(16, abs=1e-4)  # and Adam's counter
    assert lines["compute copy"] == 2 * (_NUM_PARAMETERS + 32 * (256 + 8))
    assert lines["batch"] == 4 * 32 * (256 + 8)


def test_momentum_in_bfloat16_takes_6_bytes():
    estimate = _estimate(optimizer=optax.adam(1e-3, mu_dtype=jnp.bfloat16))
    state = estimate.by_name["optimizer state"]
    assert state / _NUM_PARAMETERS == pytest.approx(6, abs=1e-4)


def test_parameters_without_masters_take_2_bytes_and_random_bits():
    lines = _estimate(policy=_WITHOUT_MASTERS).by_name
    assert lines["master parameters"] == 2 * _NUM_PARAMETERS
    assert lines["random bits"] == 16 * 256 * 512  # the second array has its turn later
    assert lines["compute copy"] == 2 * 32 * (256 + 8)


def test_the_stack_grows_with_the_microbatch_and_the_width_of_the_dtype():
    for size in (4, 16, None):
        for policy, width in (("mixed_bfloat16", 2), ("float32", 4)):
            lines = _estimate(microbatch_size=size, policy=policy).by_name
            assert lines["per-example gradients"] == (
                (size or 32) * width * _NUM_PARAMETERS
            )


def test_parameters_that_stay_in_float32_are_not_copied():
    policy = Policy.from_name("mixed_bfloat16", float32_paths=("second",))
    lines = _estimate(policy=policy, microbatch_size=4).by_name
    assert lines["compute copy"] == 2 * (256 * 512 + 32 * (256 + 8))
    assert lines["per-example gradients"] == 4 * (2 * 256 * 512 + 4 * 512 * 8)


def test_book_keeping_has_no_stack():
    assert "per-example gradients" not in _estimate(method="book_keeping").by_name


@pytest.mark.parametrize(
    ("method", "arithmetic"), [("per_example", "float32"), ("book_keeping", None)]
)
def test_the_sum_has_one_word_a_parameter(method, arithmetic):
    lines = _estimate(method=method, arithmetic=arithmetic).by_name
    assert lines["sum of gradients"] == 4 * _NUM_PARAMETERS


@pytest.mark.parametrize(
    ("changed", "moment"),
    [
        ({"microbatch_size": 4}, "clipping"),
        ({"method": "book_keeping"}, "noise"),
        ({"method": "book_keeping", "policy": _WITHOUT_MASTERS}, "rounding"),
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
    assert len(estimate.by_name) == len(estimate.lines)


def test_the_guide_has_the_total_of_the_account():
    estimate = _estimate(
        _shape(10**4, 10**3),
        _shape(2, 10),
        method="book_keeping",
    )
    total = round(estimate.total / estimate.num_parameters)
    guide = pathlib.Path(__file__).parents[2] / "docs" / "precision.md"
    assert f"a step takes up to {total} bytes for each parameter" in guide.read_text()


def test_nothing_is_allocated_for_shapes():
    # 40 terabytes of parameters, and as many of each example's gradients.
    estimate = _estimate(_shape(10**6, 10**7), _shape(64, 10**6), policy="float32")
    assert estimate.by_name["master parameters"] == 4 * 10**13
    assert estimate.by_name["per-example gradients"] == 64 * 4 * 10**13


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
    compiled = compiled_memory(
        model.loss,
        params,
        batch,
        policy="mixed_bfloat16",
        optimizer=optimizer,
        **options,
    )
    assert compiled.temporary == pytest.approx(analysis.temp_size_in_bytes, rel=0.03)


def test_a_step_of_a_billion_parameters_compiles_and_is_not_allocated():
    compiled = compiled_memory(
        _linear_loss,
        _shape(10**9),
        _shape(2, 10**9),
        policy="float32",
        optimizer=optax.sgd(1),
        microbatch_size=1,
    )
    assert compiled.total > 4 * 10**9


def test_arrays_that_a_loss_closes_over_are_arguments():
    frozen = jnp.ones((512, 8))

    def compile_step(loss_fn):
        return compiled_memory(
            loss_fn, _shape(8), _shape(4, 512), policy="float32", optimizer=optax.sgd(1)
        )

    adapted = compile_step(lambda w, x: jnp.mean((x @ frozen @ w) ** 2))
    assert adapted.arguments >= frozen.nbytes + 4 * 4 * 512


def test_donated_buffers_are_counted_once():
    compiled = CompiledMemory(5_000_000, 4_000_000, 3_000_000, 2_000_000)
    assert compiled.total == 8_000_000
    assert str(compiled) == "8.00 MB, 2.00 of it temporary"


def test_a_compiler_that_reports_nothing_is_an_error(monkeypatch):
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda _: None)
    with pytest.raises(ValueError, match="the compiler must report the memory"):
        compiled_memory(
            _linear_loss,
            _shape(8),
            _shape(4, 8),
            policy="float32",
            optimizer=optax.sgd(1),
        )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"method": "ghost"}, "method must be one of"),
        ({"policy": "half"}, "policy must be one of"),
        (
            {"method": "book_keeping", "arithmetic": "exact"},
            'must be used with method="per_example"',
        ),
        ({"microbatch_size": 5}, "microbatch_size must divide"),
        ({"microbatch_size": 0}, "microbatch_size must be an integer"),
        (
            {"batch": {"x": _shape(32, 256), "y": _shape(16, 8)}},
            "one leading axis of the same size",
        ),
    ],
)
def test_wrong_arguments_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        _estimate(**changed)
    options = {"policy": "float32", "optimizer": _ADAM, "batch": _BATCH, **changed}
    with pytest.raises(ValueError, match=message):
        compiled_memory(_mlp_loss, _MLP, **options)


def _mlp_loss(params, batch):
    hidden = jax.nn.relu(batch["x"] @ params["first"])
    return jnp.mean((hidden @ params["second"] - batch["y"]) ** 2)


def test_the_loss_of_a_step_must_be_a_scalar():
    with pytest.raises(ValueError, match="must return the loss of one example"):
        compiled_memory(
            lambda w, x: x @ w,
            _shape(8),
            _shape(4, 8),
            policy="float32",
            optimizer=optax.sgd(1),
        )


def test_accumulation_is_a_small_share_for_long_sequences():
    overhead = accumulation_overhead(1000, batch_size=8, num_positions=8 * 512)
    assert overhead.accumulation == 4 * 8 * 1000
    assert overhead.training == 6 * 1000 * 8 * 512
    assert overhead.share == pytest.approx(2 / (3 * 512))


def test_accumulation_counts_what_is_trained():
    overhead = accumulation_overhead(
        _MLP, batch_size=8, num_positions=8, num_trainable=100
    )
    assert overhead.training == 6 * 8 * _NUM_PARAMETERS
    assert overhead.accumulation == 4 * 8 * 100


@pytest.mark.parametrize("name", ["batch_size", "num_positions", "num_trainable"])
def test_accumulation_needs_sizes(name):
    sizes = {"batch_size": 8, "num_positions": 8, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be an integer"):
        accumulation_overhead(100, **sizes)
    with pytest.raises(ValueError, match="num_parameters must be an integer"):
        accumulation_overhead(0, batch_size=8, num_positions=8)


def test_the_share_of_clipping_is_measured(monkeypatch):
    def in_turn(functions, rounds):
        assert rounds == 1
        jax.block_until_ready([run() for run in functions.values()])
        return {"plain": [2.0], "clipped": [3.0]}

    monkeypatch.setattr(_timing, "in_turn", in_turn)
    params, batch = jnp.zeros(4), _shape(8, 4)
    assert measure_accumulation_share(_linear_loss, params, batch, rounds=1) == 0.5
    with pytest.raises(ValueError, match="rounds must be an integer"):
        measure_accumulation_share(_linear_loss, params, batch, rounds=0)


def _run(*arguments):
    return main(["memory", *arguments])


@pytest.mark.slow
def test_the_command_compiles_both_methods_and_counts_operations(capsys):
    small = ("--layers", "2", "--width", "16", "--heads", "2", "--length", "8")
    options = ("--batch-size", "4", "--microbatch-size", "2", "--optimizer", "sgd")
    assert _run(*small, *options, "--compile") == 0
    output = capsys.readouterr().out
    assert output.count("Compiled for this device") == 2
    for text in ("per_example:", "book_keeping:", "total", "Clipped sums"):
        assert text in output


def test_the_command_takes_a_number_of_parameters(capsys):
    assert _run("--parameters", "7000000000", "--optimizer", "sgd") == 0
    output = capsys.readouterr().out
    assert "28000.00" in output
    assert "For 64 examples of 128 tokens (--batch-size, --length): Clipped" in output


def test_the_command_refuses_sizes(capsys):
    with pytest.raises(SystemExit):
        _run("--layers", "0")
    assert "0 must be an integer of at least 1" in capsys.readouterr().err


def test_the_largest_microbatch_fits_and_the_next_one_does_not():
    params = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    batch = jax.ShapeDtypeStruct((16, 64), jnp.float32)
    options = {"policy": "float32", "optimizer": optax.sgd(0.1)}

    def loss(w, x):
        return jnp.mean((x @ w) ** 2)

    sizes = [16, 8, 4, 2, 1]
    totals = {
        size: compiled_memory(
            loss, params, batch, microbatch_size=size, **options
        ).total
        for size in sizes
    }
    for num_bytes in (totals[16], totals[4], totals[4] - 1, totals[1], totals[1] - 1):
        fitting = [size for size in sizes if totals[size] <= num_bytes]
        found = largest_microbatch(loss, params, batch, num_bytes=num_bytes, **options)
        assert (found and found[0]) == (fitting[0] if fitting else None)
    assert len(set(totals.values())) > 2


def test_the_command_says_what_fits_and_what_it_assumes(capsys):
    args = ["memory", "--fit-in", "0.001", "--layers", "1", "--width", "8"]
    args += ["--length", "4", "--batch-size", "8", "--method", "per_example"]
    args += ["--optimizer", "sgd"]
    assert main([*args]) == 0
    text = capsys.readouterr().out
    assert "Microbatches of " in text
    assert "a batch of 8 examples of 4 tokens" in text
    assert main([*args[:2], "1e-9", *args[3:]]) == 0
    assert "No microbatch fits into 1e-09 GB" in capsys.readouterr().out
