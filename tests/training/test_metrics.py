"""A run with a directory records what it releases, and keeps the loop asynchronous."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpmp
from dpmp.runs._metrics import MetricsFile, read
from dpmp.training._metrics import Metrics

SIZE = 16
DATA = {"x": np.ones((SIZE, 2), np.float32), "y": np.ones(SIZE, np.float32)}
KEY = jax.random.key(5)


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
    state = trainer.init(jnp.zeros(2), prng_key=KEY)
    options = {"progress": False, "every": 2, "checkpoint_dir": directory} | kwargs
    if directory is None:
        del options["every"]
    return trainer.fit(state, DATA, **options)


def test_every_line_has_the_released_values_of_its_step(trainer, tmp_path):
    metrics, scales = [], []

    def callback(state):
        metrics.append(float(state.metrics["overflowed"]))
        scales.append(float(state.scale_state.scale))

    run(trainer, tmp_path, callback=callback)
    lines = read(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["noisy/overflowed"] for line in lines] == metrics
    assert [line["loss_scale"] for line in lines] == scales
    assert len(set(scales)) > 1
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)
    assert "steps_per_second" not in lines[0]
    assert all(line["steps_per_second"] > 0 for line in lines[1:])


def test_the_last_line_has_the_epsilon_of_the_mechanism(trainer, tmp_path):
    run(trainer, tmp_path)
    assert read(tmp_path)[-1]["epsilon"] == trainer.mechanism.guarantee().epsilon


def test_numbers_of_the_callback_are_recorded_as_public(trainer, tmp_path, capsys):
    def callback(state):
        if int(state.step) in (2, 6):
            return {"accuracy": np.float32(0.5), "loss": jnp.float32(jnp.inf)}

    run(trainer, tmp_path, callback=callback, progress=True)
    values = {x["step"]: x.get("public/accuracy") for x in read(tmp_path)}
    assert values == {1: None, 2: 0.5, 3: None, 4: None, 5: None, 6: 0.5}
    assert read(tmp_path)[1]["public/loss"] is None
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
    ],
)
def test_anything_else_is_refused_without_its_value(trainer, returned, message):
    with pytest.raises(ValueError, match=message) as caught:
        run(trainer, callback=lambda state: returned)
    assert "731" not in str(caught.value)


def test_steps_that_are_made_again_have_one_line(trainer, tmp_path):
    class StopError(Exception):
        pass

    def callback(state):
        if int(state.step) == 5:
            raise StopError

    with pytest.raises(StopError):
        run(trainer, tmp_path, callback=callback)
    assert [x["step"] for x in read(tmp_path)] == [1, 2, 3, 4]
    run(trainer, tmp_path)
    # The callback stopped the fifth step before it was recorded.
    assert [x["step"] for x in read(tmp_path)] == [1, 2, 3, 4, 6]


class FakeSink:
    def __init__(self):
        self.steps, self.closed = [], False

    def write(self, step, values):
        self.steps.append(step)

    def close(self):
        self.closed = True


def make_metrics(tmp_path, sink, *, iterations, report_steps=()):
    return Metrics(
        [MetricsFile(tmp_path, 0), sink],
        start=0,
        iterations=iterations,
        report_steps=report_steps,
        epsilon=lambda step: None,
    )


def state_at(trainer):
    return trainer.init(jnp.zeros(2), prng_key=KEY)


def test_a_step_is_read_after_the_next_one_has_begun(trainer, tmp_path):
    sink, state = FakeSink(), state_at(trainer)
    with make_metrics(tmp_path, sink, iterations=3) as metrics:
        for step in (1, 2, 3):
            metrics.update(step, state, {})
            assert sink.steps == list(range(1, step))
    assert sink.steps == [1, 2, 3]
    assert sink.closed


def test_a_long_run_has_about_a_thousand_lines(trainer, tmp_path):
    sink, state = FakeSink(), state_at(trainer)
    with make_metrics(tmp_path, sink, iterations=50_000, report_steps=[7]) as metrics:
        for step in range(1, 121):
            metrics.update(step, state, {"x": 1.0} if step == 33 else {})
    assert sink.steps == [7, 33, 50, 100]


def test_a_file_that_cannot_be_written_is_an_error_but_hides_none(trainer, tmp_path):
    class FullSink(FakeSink):
        def write(self, step, values):
            raise OSError(28, "No space left on device")

    def fail_with(error):
        with make_metrics(tmp_path, FullSink(), iterations=3) as metrics:
            metrics.update(1, state_at(trainer), {})
            if error:
                raise error

    with pytest.raises(OSError, match="No space"):
        fail_with(None)
    with pytest.raises(KeyError) as caught:
        fail_with(KeyError("first"))
    assert "metrics were not written" in caught.value.__notes__[0]


def test_lines_are_json_without_nan(trainer, tmp_path):
    run(trainer, tmp_path, callback=lambda state: {"x": math.nan})
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
