"""What a run shows and records: released values, and never less than is spent."""

import dataclasses
import functools
import io
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_runs import (
    DATA,
    KEY,
    MECHANISM,
    PARAMS,
    SIZE,
    fit,
    fresh_trainer,
    new_trainer,
)

import dpmp
from dpmp.runs import read_metrics
from dpmp.training import _report
from dpmp.training._report import OverflowWarning, Report, SpentPrivacy


@pytest.fixture(scope="module")
def trainer():
    scale = dpmp.loss_scaling.DynamicScale(initial=64.0, growth_interval=2)
    return new_trainer(policy="mixed_float16", loss_scale=scale, iterations=6)


def run(trainer, directory=None, **options):
    every = {} if directory is None else {"every": 2}
    return fit(trainer, directory, **every | options)


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
        ({"accuracy": np.complex64(0.731j)}, "must be a real scalar"),
        ({"accuracy": b"0.731"}, "must be a real scalar"),
        ({"accuracy": np.array("0.731")}, "must be a real scalar"),
        ({"accuracy": np.ma.masked}, "must be a real scalar"),
    ],
)
def test_anything_else_is_refused_without_its_value(trainer, returned, message):
    with pytest.raises(ValueError, match=message) as caught:
        run(trainer, callback=lambda state: returned)
    assert "731" not in str(caught.value)


def test_a_recorded_value_is_that_of_its_step(trainer):
    """The arrays of a state are used up by the next step."""
    report = Report(trainer.mechanism, float, 0, 6, enabled=False, seconds=1e3)
    metrics = {"overflowed": jnp.float32(0.25)}
    state = trainer.init(PARAMS)._replace(metrics=metrics)
    report.record(1, state, is_last=False)
    jax.tree.map(lambda x: x.delete(), (state.metrics, state.scale_state))
    (line,) = report.take_lines()
    assert (line["step"], line["noisy/overflowed"]) == (1, 0.25)
    assert 1000.0 <= line["seconds"] < 1010.0  # of the whole run
    assert report.take_lines() == []


# Gradients that are not finite.


EXPECTED = MECHANISM.expected_batch_size
NAN = DATA | {"x": np.full_like(DATA["x"], np.nan)}


@functools.cache
def linear(**fields):
    options = {"noise_multiplier": 0.5, "optimizer": optax.sgd(0.0), "prng_key": KEY}
    return new_trainer(**options | fields)


def overflowed(trainer, data, *args, **options):
    seen = []

    def callback(state):
        seen.append(float(state.metrics["overflowed"]))

    fit(trainer, *args, data=data, callback=callback, **options)
    return np.array(seen)


@pytest.mark.parametrize(
    ("fields", "has_directory"),
    [
        ({"is_private": True}, True),
        ({"released_metrics": dpmp.ReleasedMetrics(fraction_clipped=True)}, False),
    ],
    ids=["plain", "clipped"],
)
def test_a_run_on_nan_says_so_once(fields, has_directory, tmp_path, capsys):
    trainer, progress = linear(**fields), not has_directory
    directory = tmp_path if has_directory else None
    with pytest.warns(UserWarning, match="had a gradient with NaN or infinity") as said:
        seen = overflowed(trainer, NAN, directory, progress=progress)
    assert len(said) == 1
    if not has_directory:
        spread = trainer.mechanism.overflow_stddev / EXPECTED
        # Binomial batches, and the noise.
        assert abs(seen.mean() - 1) < 5 * math.hypot(spread, math.sqrt(4) / EXPECTED)
    shown = capsys.readouterr().err
    assert (f"noisy overflowed {seen[-1]:.3g}" in shown) == bool(shown) == progress


@pytest.mark.parametrize("is_private", [False, True])
def test_the_fraction_is_exact_without_privacy_and_noisy_with_it(is_private):
    trainer = linear(is_private=is_private)
    seen = overflowed(trainer, DATA)
    assert np.all((seen != 0) == is_private)
    assert np.all(np.abs(seen) < 5 * 0.5 / EXPECTED)
    if not is_private:
        half = np.where(np.arange(SIZE)[:, None] % 2, DATA["x"], np.float32(np.nan))
        with pytest.warns(UserWarning, match="NaN or infinity"):
            assert np.all(overflowed(trainer, DATA | {"x": half}) * EXPECTED % 1 == 0)


@pytest.mark.parametrize(("is_dynamic", "first"), [(False, 3), (True, 50)])
def test_the_warning_waits_for_a_clear_fraction(is_dynamic, first, recwarn):
    def looks(overflowed, step=first):
        warning = OverflowWarning(0.01, 10, is_dynamic)
        warning.look(10 + step, {"overflowed": overflowed}, is_reported=True)
        said = [str(x.message) for x in recwarn.list]
        recwarn.clear()
        return " ".join(said)

    assert not looks(1.0, first - 1)
    assert not looks(0.05)  # five standard deviations
    assert not looks(math.nan)
    assert "about 7% of the examples" in looks(0.07)


# Epsilon.


LONG = dataclasses.replace(MECHANISM, iterations=2000)


def set_clock(monkeypatch, ticks):
    """Every look at the clock takes the next number of seconds."""
    times = itertools.accumulate(ticks)
    monkeypatch.setattr(_report.time, "monotonic", lambda: next(times))


@pytest.mark.parametrize(("start", "stop"), [(3, 50), (0, 7), (10, 1234)])
def test_never_less_is_quoted_than_is_spent(start, stop, monkeypatch):
    """Here, epsilon is the number of steps, to see which are quoted."""
    set_clock(monkeypatch, itertools.repeat(2.0))
    report = Report(LONG, float, start, stop, enabled=False)
    for step in range(start + 1, stop + 1):
        quoted = re.search(r"epsilon (?:below )?(\d+\.\d+)", report._describe(step))[1]
        assert step <= float(quoted) <= stop
    assert float(quoted) == stop


def test_the_speed_is_that_of_the_expected_batches_since_the_first_step(monkeypatch):
    set_clock(monkeypatch, itertools.repeat(0.0))
    report = Report(LONG, float, 0, 100, enabled=False)
    report._first = 1, -5.0
    size = LONG.expected_batch_size  # of each of ten steps in five seconds
    shown = f"{2 * size:.1f} examples/s, 0:00:44 left"
    assert report._describe(11).endswith(shown)  # 89 steps to go


def spent_by(mechanism):
    return SpentPrivacy(mechanism, 6, lambda step: mechanism.guarantee(step).epsilon)


@pytest.mark.parametrize("noise_multiplier", [0.7, 1.37, 3.3])
def test_no_less_epsilon_is_quoted_than_is_spent(noise_multiplier, monkeypatch):
    set_clock(monkeypatch, itertools.chain([0, 1, 1e6], itertools.repeat(1)))
    mechanism = dataclasses.replace(LONG, noise_multiplier=noise_multiplier)
    spent = spent_by(mechanism)
    _, at_three, _, final = spent.describe(3).split(" ")
    _, at_end, *_, delta = spent.at_end.split(" ")
    for quoted, step in ((at_three, 3), (final, 6), (at_end, 6)):
        epsilon = mechanism.guarantee(step).epsilon
        assert epsilon <= float(quoted) < epsilon + 0.01
    assert float(delta) == mechanism.delta


def test_without_noise_or_delta_there_is_no_epsilon():
    public = spent_by(LONG.without_privacy())
    assert public.describe(3) == public.at_end == "no privacy"
    spent = spent_by(dataclasses.replace(LONG, delta=None))
    assert spent.describe(3) == "epsilon not shown without a delta"
    assert spent.epsilon(6) is None


def test_a_run_goes_on_if_nobody_reads_its_lines(monkeypatch):
    class Broken(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr("sys.stderr", Broken())
    assert int(fit(fresh_trainer(), progress=True).step) == 7
