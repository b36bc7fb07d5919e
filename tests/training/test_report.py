"""What a run shows and records: released values, and never less than is spent."""

import dataclasses
import decimal
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
import rich.console
from small_runs import (
    DATA,
    KEY,
    MECHANISM,
    PARAMS,
    SIZE,
    FailureError,
    fails_at,
    fit,
    new_trainer,
)

import dpmp
from dpmp.runs import read_metrics
from dpmp.training import _report
from dpmp.training._checks import as_public
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
        ({"accuracy": np.complex64(0.731j)}, "must be a real scalar"),
        ({"accuracy": b"0.731"}, "must be a real scalar"),
        ({"accuracy": np.array("0.731")}, "must be a real scalar"),
        ({"accuracy": np.ma.masked}, "must be a real scalar"),
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
    report, state = report_on(trainer.mechanism, seconds=1e3), trainer.init(PARAMS)
    state = state._replace(metrics={"overflowed": jnp.float32(0.25)})
    report.record(1, state, is_last=False)
    jax.tree.map(lambda x: x.delete(), (state.metrics, state.scale_state))
    (line,) = report.take_lines()
    assert (line["step"], line["noisy/overflowed"]) == (1, 0.25)
    assert 1000.0 <= line["seconds"] < 1010.0  # of the whole run
    assert report.take_lines() == []


@pytest.mark.filterwarnings("ignore:products of few bits")
@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, "loss in bfloat16, "),
        ({"float32_paths": ("b",)}, "loss in bfloat16 (1 of 2 products), "),
        (
            {"products": {"a": "int8", "": "compute"}, "rounded_share": 0.5},
            "loss in bfloat16 with products={'a': 'int8', '': 'compute'}, each in 50% "
            "of the steps, ",
        ),
    ],
)
def test_the_first_line_says_how_products_are_computed(options, shown, capsys):
    def loss(params, x):
        hidden = x @ params["a"]
        last = params["b"]
        return jnp.mean((hidden.astype(last.dtype) @ last).astype(jnp.float32) ** 2)

    trainer = dpmp.DPTrainer(
        mechanism=dpmp.DPSGD(
            num_examples=64,
            expected_batch_size=16,
            iterations=1,
            l2_clip_norm=1.0,
            noise_multiplier=1.0,
        ),
        loss_fn=loss,
        optimizer=optax.sgd(0.1),
        policy=dpmp.Policy(jnp.float32, jnp.bfloat16, **options),
    )
    params = {"a": jnp.ones((3, 4)), "b": jnp.ones(4)}
    trainer.fit(trainer.init(params), np.ones((64, 3), np.float32))
    assert shown in capsys.readouterr().err


def test_a_line_shows_the_values_of_the_last_release(trainer):
    """Also if the release was between two lines."""
    mechanism = dataclasses.replace(trainer.mechanism, iterations=60)
    shown = io.StringIO()
    console = rich.console.Console(file=shown, width=200)
    report = Report(mechanism, float, 0, 60, enabled=True, console=console)
    state = trainer.init(PARAMS)._replace(metrics={"overflowed": jnp.float32(0.25)})
    assert 7 not in report.report_steps
    report.record(7, state, is_last=True)
    report.show(7, state.step, state.metrics, {})
    assert shown.getvalue() == ""
    report.show(12, state.step, {}, {})
    assert "noisy overflowed 0.25" in shown.getvalue()
    with Report(mechanism, float, 60, 60, enabled=True, console=console):
        text = "goes on from step 60, the last one: its parameters are returned"
        assert text in shown.getvalue()


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


# What is shown.


LONG = dataclasses.replace(MECHANISM, iterations=2000)


class Run:
    """Reports on a run, written to a string, with a clock that ticks 2 s a step.

    Epsilon is the number of steps, to see which are quoted.
    """

    def __init__(self, monkeypatch, *, is_terminal=False, width=200, **options):
        self.file = io.StringIO()
        console = rich.console.Console(
            file=self.file, force_terminal=is_terminal, width=width
        )
        options = {"start": 0, "stop": 100, "mechanism": LONG} | options
        self.steps = range(options["start"] + 1, options["stop"] + 1)
        self.progress = Report(console=console, **{"epsilon": float} | options)
        set_clock(monkeypatch, itertools.repeat(2.0))

    def update(self, step, metrics=None, public=None):
        self.progress.show(step, 0, metrics or {}, public or {})

    def lines(self, *values):
        with self.progress:
            for step in self.steps:
                self.update(step, *values)
        return self.file.getvalue().splitlines()[1:]


def set_clock(monkeypatch, ticks):
    """Every look at the clock takes the next number of seconds."""
    times = itertools.accumulate(ticks)
    monkeypatch.setattr(_report.time, "monotonic", lambda: next(times))


@pytest.fixture
def make_run(monkeypatch):
    return lambda **options: Run(monkeypatch, **options)


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize(("start", "stop"), [(3, 50), (0, 7), (10, 1234)])
def test_never_less_is_quoted_than_is_spent(make_run, start, stop, is_terminal):
    quoted = {}
    run = make_run(start=start, stop=stop, is_terminal=is_terminal)
    for step in run.steps:
        text = run.progress._describe(step)
        quoted[step] = float(re.search(r"epsilon (?:below )?(\d+\.\d+)", text)[1])
    assert all(step <= covered <= stop for step, covered in quoted.items())
    assert quoted[stop] == stop


# What is spent.


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


def test_epsilon_is_left_out_where_computing_it_takes_too_much_of_the_run(monkeypatch):
    # The final epsilon takes 1 s. Steps begin at once, and take 1 s each.
    set_clock(monkeypatch, itertools.chain([0, 1, 0], itertools.repeat(1)))
    spent = spent_by(LONG)
    final = spent.describe(6).split(" of ")[1]
    for _ in range(75):
        assert spent.describe(3) == f"epsilon below {final}"
        assert spent.epsilon(3) is None
    assert spent.epsilon(6) == LONG.guarantee(6).epsilon
    # After 200 s, two times 1 s is one per cent.
    for _ in range(100):
        spent.describe(3)
    assert spent.describe(3).endswith(f" of {final}")


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

    trainer = new_trainer()
    monkeypatch.setattr("sys.stderr", Broken())
    assert int(trainer.fit(trainer.init(PARAMS), DATA).step) == 7


class OfAnotherLibrary:
    """As a tensor of PyTorch, whose dtype is none of NumPy."""

    dtype = "torch.float32"

    def __float__(self):
        return 0.5


@pytest.mark.parametrize("number", [decimal.Decimal("0.5"), OfAnotherLibrary()])
def test_numbers_of_other_libraries_may_be_returned(number):
    assert float(as_public({"accuracy": number})["accuracy"]) == 0.5
