"""A run records what it releases, and warns of gradients that are not finite."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_runs import FailureError, fails_at

import dpmp
from dpmp.runs import read_metrics
from dpmp.training._report import OverflowWarning, Report

SIZE = 16
DATA = {"x": np.ones((SIZE, 2), np.float32), "y": np.ones(SIZE, np.float32)}


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params.astype(batch["x"].dtype) - batch["y"]) ** 2)


@pytest.fixture(scope="module")
def trainer():
    return dpmp.DPTrainer(
        mechanism=dpmp.DPSGD(
            num_examples=SIZE,
            expected_batch_size=8,
            iterations=6,
            l2_clip_norm=1.0,
            noise_multiplier=1.0,
            delta=1e-3,
        ),
        loss_fn=loss_fn,
        optimizer=optax.sgd(0.1),
        policy="mixed_float16",
        loss_scale=dpmp.loss_scaling.DynamicScale(initial=64.0, growth_interval=2),
    )


def run(trainer, directory=None, **kwargs):
    state = trainer.init(jnp.zeros(2))
    options = {"progress": False, "every": 2, "checkpoint_dir": directory} | kwargs
    if directory is None:
        del options["every"]
    return trainer.fit(state, DATA, **options)


def test_every_line_has_the_released_values_of_its_step(trainer, tmp_path):
    metrics, scales = [], []

    def callback(state):
        metrics.append(float(state.metrics["overflowed"]))
        scales.append(float(state.scale_state.scale))

    run(trainer, tmp_path, callback=callback, every=1)
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["noisy/overflowed"] for line in lines] == metrics
    assert [line["loss_scale"] for line in lines] == scales
    assert len(set(scales)) > 1
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)
    assert "steps_per_second" not in lines[0]
    assert all(line["steps_per_second"] > 0 for line in lines[1:])
    assert lines[-1]["epsilon"] == trainer.mechanism.guarantee().epsilon


def test_lines_come_with_their_checkpoint(trainer, tmp_path):
    seen = []

    def callback(state):
        seen.append([line["step"] for line in read_metrics(tmp_path)])

    run(trainer, tmp_path, callback=callback, every=4)
    assert seen == [[], [1, 2, 3, 4]]  # the callback may add to the last line
    assert [x["step"] for x in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_numbers_of_the_callback_are_recorded_as_public(trainer, tmp_path, capsys):
    def callback(state):
        if int(state.step) in (2, 6):
            return {"accuracy": np.float32(0.5), "loss": jnp.float32(jnp.inf)}

    run(trainer, tmp_path, callback=callback, progress=True)
    values = {x["step"]: x.get("public/accuracy") for x in read_metrics(tmp_path)}
    assert values == {1: None, 2: 0.5, 3: None, 4: None, 5: None, 6: 0.5}
    assert read_metrics(tmp_path)[1]["public/loss"] is None
    assert ", public accuracy 0.5, public loss inf, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (0.731, "must return None, or a dict"),
        ({3: 0.731}, "must return None, or a dict"),
        ({"accuracy": np.full(2, 0.731)}, "must be a real scalar; got name='accuracy'"),
        ({"accuracy": "0.731"}, "must be a real scalar"),
        ({"accuracy": None}, "must be a real scalar"),
        ({"accuracy": 0.731j}, "must be a real scalar"),
        ({"accuracy": np.datetime64("2026-01-01")}, "must be a real scalar"),
    ],
)
def test_anything_else_is_refused_without_its_value(trainer, returned, message):
    with pytest.raises(ValueError, match=message) as caught:
        run(trainer, callback=lambda state: returned)
    assert "731" not in str(caught.value)


def test_steps_have_one_line_after_an_exception(trainer, tmp_path):
    with pytest.raises(FailureError):
        run(trainer, tmp_path, callback=fails_at(4))
    # The lines of the block whose callback failed are in its checkpoint.
    assert [x["step"] for x in read_metrics(tmp_path)] == [1, 2]
    run(trainer, tmp_path)
    assert [x["step"] for x in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]


def report_on(mechanism, **options):
    stop = mechanism.iterations
    return Report(mechanism, float, 0, stop, enabled=False, **options)


def test_a_recorded_value_is_that_of_its_step(trainer):
    """The arrays of a state are used up by the next step."""
    report, state = report_on(trainer.mechanism, seconds=1e3), trainer.init(jnp.ones(2))
    state = state._replace(metrics={"overflowed": jnp.float32(0.5)})
    report.record(1, state, is_last=False)
    jax.tree.map(lambda x: x.delete(), (state.metrics, state.scale_state))
    (line,) = report.take_lines()
    assert (line["step"], line["noisy/overflowed"]) == (1, 0.5)
    assert 1000.0 <= line["seconds"] < 1010.0  # of the whole run
    assert report.take_lines() == []


def test_a_long_run_has_about_a_thousand_lines(trainer):
    state = trainer.init(jnp.zeros(2))
    mechanism = dataclasses.replace(trainer.mechanism, iterations=50_000)
    report = report_on(mechanism)
    for step in (*range(1, 121), 5000):
        report.record(step, state, is_last=step == 33)
    assert [x["step"] for x in report.take_lines()] == [33, 50, 100, 5000]


@pytest.mark.parametrize("when", ["metrics", "release"])
def test_metrics_that_cannot_be_written_are_an_error(
    trainer, tmp_path, monkeypatch, when
):
    def full(*_):
        raise OSError(28, "No space left on device")

    def callback(state):
        place = "dpmp.runs._metrics" if when == "metrics" else "dpmp.runs._ledger"
        monkeypatch.setattr(f"{place}.open_file", full)

    with pytest.raises(OSError, match=r"No space left on device.*Make room"):
        run(trainer, tmp_path, callback=callback)
    monkeypatch.undo()
    run(trainer, tmp_path)
    assert [x["step"] for x in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]


# Gradients that are not finite.


NAN = np.full((SIZE, 2), np.nan, np.float32)


@functools.cache
def linear(is_private=True, **fields):
    mechanism = dpmp.DPSGD(
        num_examples=SIZE,
        expected_batch_size=8,
        iterations=6,
        l2_clip_norm=1.0,
        noise_multiplier=0.5,
        **fields,
    )
    return dpmp.DPTrainer(
        mechanism=mechanism if is_private else mechanism.without_privacy(),
        loss_fn=lambda w, x: jnp.mean(x @ w),
        optimizer=optax.sgd(0.0),
        policy="float32",
        prng_key=jax.random.key(0),
    )


def fit(trainer, data, **options):
    seen = []
    trainer.fit(
        trainer.init(jnp.zeros(2)),
        data,
        callback=lambda state: seen.append(float(state.metrics["overflowed"])),
        **options,
    )
    return np.array(seen)


@pytest.mark.parametrize("has_directory", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"arithmetic": "float32"},
        {"method": "book_keeping"},
        {"released_metrics": dpmp.ReleasedMetrics(fraction_clipped=True)},
    ],
    ids=["float32", "bounded", "clipped"],
)
def test_a_run_on_nan_says_so_once(fields, has_directory, tmp_path, capsys):
    trainer, progress = linear(**fields), not has_directory
    options = {"checkpoint_dir": tmp_path} if has_directory else {}
    with pytest.warns(UserWarning, match="had a gradient with NaN or infinity") as said:
        seen = fit(trainer, NAN, progress=progress, **options)
    assert len(said) == 1
    if not has_directory:
        spread = trainer.mechanism.overflow_stddev / 8
        # Binomial batches, and the noise.
        assert abs(seen.mean() - 1) < 5 * math.hypot(spread, math.sqrt(4) / 8)
    shown = capsys.readouterr().err
    assert (f"noisy overflowed {seen[-1]:.3g}" in shown) == bool(shown) == progress


@pytest.mark.parametrize("is_private", [False, True])
def test_the_fraction_is_exact_without_privacy_and_noisy_with_it(is_private):
    data = np.ones((SIZE, 2), np.float32)
    seen = fit(linear(is_private), data, progress=False)
    assert np.all((seen != 0) == is_private)
    assert np.all(np.abs(seen) < 5 * 0.5 / 8)
    if not is_private:
        data[::2] = np.nan
        with pytest.warns(UserWarning, match="NaN or infinity"):
            assert np.all(fit(linear(is_private), data) * 8 % 1 == 0)


@pytest.mark.parametrize(("is_dynamic", "first"), [(False, 3), (True, 50)])
def test_the_warning_waits_for_a_clear_fraction(is_dynamic, first, recwarn):
    def looks(overflowed, step=first):
        warning = OverflowWarning(0.01, start=10, is_dynamic=is_dynamic)
        warning.look(10 + step, {"overflowed": overflowed}, is_reported=True)
        said = [str(x.message) for x in recwarn.list]
        recwarn.clear()
        return " ".join(said)

    assert not looks(1.0, first - 1)
    assert not looks(0.05)  # five standard deviations
    assert not looks(math.nan)
    assert "about 7% of the examples" in looks(0.07)


def test_the_device_is_looked_at_where_it_is_reported():
    looks = []

    class Fraction:
        def __float__(self):
            looks.append(None)
            return 0.0

    warning = OverflowWarning(0.01, start=0, is_dynamic=False)
    for step in range(1, 100):
        metrics = {"overflowed": Fraction()}
        warning.look(step, metrics, is_reported=step in (50, 99))
    assert len(looks) == 3
