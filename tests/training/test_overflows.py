"""A run whose gradients overflow says so, from released values alone."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpmp
from dpmp.training._overflows import OverflowNote

NUM_EXAMPLES = 32


def make_trainer(**fields):
    mechanism = dpmp.DPSGD(
        **{
            "num_examples": NUM_EXAMPLES,
            "expected_batch_size": 16,
            "iterations": 6,
            "l2_clip_norm": 1.0,
            "noise_multiplier": 0.5,
            **fields,
        }
    )
    return dpmp.DPTrainer(
        mechanism=mechanism,
        loss_fn=lambda w, x: jnp.mean(x @ w),
        optimizer=optax.sgd(0.0),
        policy="float32",
    )


def fit(trainer, data):
    seen = []
    trainer.fit(
        trainer.init(jnp.zeros(3), prng_key=jax.random.key(0)),
        data,
        callback=lambda state: seen.append(float(state.metrics["overflowed"])),
    )
    return np.array(seen)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"arithmetic": "float32"},
        {"method": "book_keeping"},
        {"released_metrics": dpmp.ReleasedMetrics(fraction_clipped=True)},
    ],
    ids=["exact", "float32", "bounded", "clipped"],
)
def test_a_run_on_nan_says_so_once(fields, capsys):
    trainer = make_trainer(**fields)
    seen = fit(trainer, np.full((NUM_EXAMPLES, 3), np.nan, np.float32))
    spread = trainer.mechanism.overflow_stddev / 16
    # Binomial batches, and the noise.
    assert abs(seen.mean() - 1) < 5 * math.hypot(spread, math.sqrt(8) / 16)
    printed = capsys.readouterr().err
    assert printed.count("NaN or infinity") == 1
    assert f"noisy overflowed {seen[-1]:.3g}" in printed


def test_a_run_without_overflows_shows_noise_and_no_note(capsys):
    seen = fit(make_trainer(), np.ones((NUM_EXAMPLES, 3), np.float32))
    assert np.all(seen != 0)
    assert np.all(np.abs(seen) < 5 * 0.5 / 16)
    assert "NaN or infinity" not in capsys.readouterr().err


def test_a_run_without_privacy_counts_exactly(capsys):
    data = np.ones((NUM_EXAMPLES, 3), np.float32)
    data[::2] = np.nan
    trainer = make_trainer()
    public = dataclasses.replace(trainer, mechanism=trainer.mechanism.without_privacy())
    assert np.all(fit(public, data) * 16 % 1 == 0)
    assert "NaN or infinity" in capsys.readouterr().err


def test_the_noise_on_the_gradient_and_epsilon_are_those_without_the_count():
    trainer = make_trainer(delta=1e-5)
    mechanism = trainer.mechanism
    assert mechanism.stddev == 0.5 * 1.0 / 16
    assert "gradient is not finite" in " ".join(mechanism.statement().split())


@pytest.mark.parametrize(("is_dynamic", "first"), [(False, 3), (True, 50)])
def test_the_note_waits_for_a_clear_fraction(is_dynamic, first):
    note = OverflowNote(0.01, is_dynamic=is_dynamic)
    assert note.first_look == first
    assert not note.text(first - 1, {"overflowed": 1.0})
    assert not note.text(first, {"overflowed": 0.05})  # five standard deviations
    assert not note.text(first, {"overflowed": math.nan})
    assert "about 7% of the examples" in note.text(first, {"overflowed": 0.07})
    assert not note.text(first, {"overflowed": 1.0})
