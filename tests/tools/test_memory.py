"""Estimates of memory, against what programs are compiled to."""

import argparse

import jax
import jax.numpy as jnp
import optax
import pytest

from dpmp import Policy
from dpmp.tools import _timing
from dpmp.tools.memory import (
    _command,
    accumulation_overhead,
    add_memory_command,
    compiled_memory,
    estimate_memory,
    measure_accumulation_share,
)

_METHODS = (None, "per_example", "book_keeping")


def _shape(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def _mlp_loss(params, batch):
    hidden = jax.nn.relu(batch["x"] @ params["first"])
    return jnp.mean((hidden @ params["second"] - batch["y"]) ** 2)


_MLP = {"first": _shape(256, 512), "second": _shape(512, 8)}
_BATCH = {"x": _shape(32, 256), "y": _shape(32, 8)}
_NUM_PARAMETERS = 256 * 512 + 512 * 8


def _estimate(**changed):
    options = {"policy": "mixed_bfloat16", "optimizer": optax.adam(1e-3), **changed}
    params = options.pop("params", _MLP)
    batch = options.pop("batch", _BATCH)
    return estimate_memory(options.pop("loss_fn", _mlp_loss), params, batch, **options)


def _decoder_loss(params, tokens):
    x = params["embed"][tokens]
    q, k, v = jnp.split(x @ params["qkv"], 3, axis=-1)
    scores = jnp.einsum("btd,bsd->bts", q, k).astype(jnp.float32)
    causal = jnp.tri(x.shape[1], dtype=bool)
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9)).astype(x.dtype)
    x = x + jnp.einsum("bts,bsd->btd", weights, v) @ params["out"]
    x = x + jax.nn.relu(x @ params["up"]) @ params["down"]
    logits = (x @ params["embed"].T)[:, :-1].astype(jnp.float32)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
    return -jnp.mean(chosen)


def _decoder(width=64, length=64, batch_size=16):
    params = {
        "embed": _shape(256, width),
        "qkv": _shape(width, 3 * width),
        "out": _shape(width, width),
        "up": _shape(width, 4 * width),
        "down": _shape(4 * width, width),
    }
    return _decoder_loss, params, _shape(batch_size, length, dtype=jnp.int32)


@pytest.mark.parametrize("method", _METHODS)
def test_lines_add_up_to_the_total(method):
    estimate = _estimate(method=method)
    assert estimate.total == sum(line.num_bytes for line in estimate.lines)
    assert len(estimate.by_name) == len(estimate.lines)


def test_mixed_precision_with_adam_takes_16_bytes_for_a_parameter():
    lines = _estimate(microbatch_size=4).by_name
    names = ("master parameters", "optimizer state", "sum of gradients")
    state = [lines[name] / _NUM_PARAMETERS for name in names]
    assert sum(state) == pytest.approx(16, abs=1e-4)  # and Adam's counter
    assert lines["compute copy"] - 2 * _NUM_PARAMETERS == 2 * 32 * (256 + 8)


def test_momentum_in_bfloat16_takes_6_bytes():
    estimate = _estimate(optimizer=optax.adam(1e-3, mu_dtype=jnp.bfloat16))
    state = estimate.by_name["optimizer state"]
    assert state / _NUM_PARAMETERS == pytest.approx(6, abs=1e-4)


def test_the_stack_grows_with_the_microbatch_and_the_width_of_the_dtype():
    for size in (4, 16):
        for policy, width in (("mixed_bfloat16", 2), ("float32", 4)):
            lines = _estimate(microbatch_size=size, policy=policy).by_name
            assert lines["per-example gradients"] == size * width * _NUM_PARAMETERS


def test_records_grow_no_more_than_linearly_with_the_microbatch():
    loss_fn, params, batch = _decoder(width=32, length=16, batch_size=4)
    records = [
        _estimate(
            loss_fn=loss_fn,
            params=params,
            batch=batch,
            method="book_keeping",
            microbatch_size=size,
        ).by_name["records"]
        for size in (2, 4)
    ]
    assert records[0] < records[1] <= 2 * records[0]


def test_nothing_is_allocated_for_shapes():
    # 40 terabytes of parameters, and as many of each example's gradients.
    estimate = _estimate(
        loss_fn=lambda w, x: jnp.mean((x @ w) ** 2),
        params=_shape(10**6, 10**7),
        batch=_shape(64, 10**6),
        method=None,
    )
    assert estimate.by_name["master parameters"] == 4 * 10**13


def test_arrays_count_as_their_shapes():
    arrays = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (_MLP, _BATCH))
    assert _estimate() == _estimate(params=arrays[0], batch=arrays[1])


def test_the_table_shows_every_line_and_bytes_for_a_parameter():
    text = str(_estimate(microbatch_size=4))
    for name in ("master parameters", "per-example gradients", "total"):
        assert name in text
    assert "8.00" in text


def _ratio(loss_fn, params, batch, **options):
    options["optimizer"] = optax.adam(1e-3)
    estimate = estimate_memory(loss_fn, params, batch, **options)
    with jax.numpy_dtype_promotion("standard"):  # Adam needs it
        compiled = compiled_memory(loss_fn, params, batch, **options)
    return estimate.compare(compiled)


def test_estimate_is_within_15_percent_of_a_step_without_privacy():
    ratio = _ratio(_mlp_loss, _MLP, _BATCH, policy="float32", method=None)
    assert 0.85 < ratio < 1.15


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32"])
@pytest.mark.parametrize("method", _METHODS)
def test_estimate_is_within_15_percent_for_a_perceptron(method, policy):
    ratio = _ratio(
        _mlp_loss, _MLP, _BATCH, policy=policy, method=method, microbatch_size=8
    )
    assert 0.85 < ratio < 1.15


def test_parameters_without_masters_are_estimated_too():
    policy = Policy(jnp.bfloat16, jnp.bfloat16, stochastic_rounding=True)
    estimate = _estimate(policy=policy, method=None, microbatch_size=8)
    assert estimate.by_name["master parameters"] == 2 * _NUM_PARAMETERS
    assert estimate.by_name["optimizer state"] >= 8 * _NUM_PARAMETERS
    ratio = _ratio(
        _mlp_loss, _MLP, _BATCH, policy=policy, method=None, microbatch_size=8
    )
    assert 0.85 < ratio < 1.15


@pytest.mark.slow
@pytest.mark.parametrize("method", _METHODS)
def test_estimate_is_within_15_percent_for_a_decoder_in_a_loop(method):
    sizes = argparse.Namespace(
        layers=4, width=128, heads=4, vocabulary=256, length=64, batch_size=16
    )
    params, batch = _command.transformer_shapes(sizes)
    loss_fn = _command.transformer_loss(sizes.heads)
    ratio = _ratio(
        loss_fn,
        params,
        batch,
        policy="mixed_bfloat16",
        method=method,
        microbatch_size=8,
    )
    assert 0.85 < ratio < 1.15


def test_unknown_method_policy_and_arithmetic_are_refused():
    with pytest.raises(ValueError, match="method must be one of"):
        _estimate(method="ghost")
    with pytest.raises(ValueError, match="policy must be one of"):
        _estimate(policy="half")
    with pytest.raises(ValueError, match="exact sums need gradients"):
        _estimate(method="book_keeping", arithmetic="exact")


def test_microbatches_must_divide_the_batch():
    with pytest.raises(ValueError, match="microbatch_size must divide"):
        _estimate(microbatch_size=5)
    with pytest.raises(ValueError, match="microbatch_size must be an integer"):
        _estimate(microbatch_size=0)


def test_arrays_of_a_batch_must_agree():
    with pytest.raises(ValueError, match="one leading axis"):
        _estimate(batch={"x": _shape(32, 256), "y": _shape(16, 8)})


def test_loss_must_be_a_scalar():
    with pytest.raises(ValueError, match="the loss must be a scalar"):
        _estimate(loss_fn=lambda params, batch: batch["x"] @ params["first"])


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


def test_measured_share_is_shown_beside_the_count(monkeypatch):
    def in_turn(functions, rounds):
        assert rounds == 1
        jax.block_until_ready([run() for run in functions.values()])
        return {"plain": [2.0], "clipped": [3.0]}

    monkeypatch.setattr(_timing, "in_turn", in_turn)
    params, batch = jnp.zeros(4), _shape(8, 4)

    def loss_fn(w, x):
        return jnp.mean((x @ w) ** 2)

    measured = measure_accumulation_share(loss_fn, params, batch, rounds=1)
    assert measured == 0.5
    text = str(
        accumulation_overhead(4, batch_size=8, num_positions=8, measured=measured)
    )
    assert "Measured" in text
    with pytest.raises(ValueError, match="rounds must be an integer"):
        measure_accumulation_share(loss_fn, params, batch, rounds=0)


def _run(*arguments):
    parser = argparse.ArgumentParser()
    add_memory_command(parser.add_subparsers())
    args = parser.parse_args(["memory", *arguments])
    return args.command(args)


def test_command_prints_all_methods_side_by_side(capsys):
    assert _run("--layers", "2", "--width", "32", "--batch-size", "4") == 0
    output = capsys.readouterr().out
    for text in ("no privacy", "per_example", "book_keeping", "total", "clipped sums"):
        assert text in output


@pytest.mark.slow
def test_command_can_compile(capsys):
    small = ("--layers", "1", "--width", "16", "--heads", "2", "--length", "8")
    with jax.numpy_dtype_promotion("standard"):  # Adam needs it
        assert _run(*small, "--batch-size", "2", "--method", "none", "--compile") == 0
    assert "compiled here" in capsys.readouterr().out


def test_command_takes_a_number_of_parameters(capsys):
    assert _run("--parameters", "7000000000", "--optimizer", "sgd") == 0
    assert "28,000.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--width", "30"), "--heads 4 must divide --width 30"),
        (("--microbatch-size", "7"), "--microbatch-size 7 must divide"),
        (("--layers", "0"), "0 must be an integer of at least 1"),
        (("--parameters", "8", "--compile"), "--compile and --measure need a model"),
        (("--optimizer", "lion"), "invalid choice"),
    ],
)
def test_command_refuses_bad_options(capsys, arguments, message):
    with pytest.raises(SystemExit):
        _run(*arguments)
    assert message in capsys.readouterr().err
