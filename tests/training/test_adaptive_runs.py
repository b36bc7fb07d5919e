"""Runs whose clip norm adapts: it is a released part of the state, and is resumed."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpmp

SIZE = 32
DATA = {"x": np.eye(SIZE, 3, dtype=np.float32) + 1, "y": np.ones(SIZE, np.float32)}
PARAMS = {"w": jnp.zeros(3)}
ADAPTIVE = dpmp.AdaptiveClipNorm(initial=2.0)


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


@functools.cache
def trainer(adaptive=ADAPTIVE, method="per_example"):
    mechanism = dpmp.DPSGD(
        num_examples=SIZE,
        expected_batch_size=8,
        iterations=4,
        l2_clip_norm=adaptive,
        noise_multiplier=1.0,
        delta=1e-3,
        method=method,
    )
    return dpmp.DPTrainer(
        mechanism=mechanism,
        loss_fn=loss_fn,
        optimizer=optax.sgd(0.1),
        policy="float32",
        prng_key=jax.random.key(0),
    )


def fit(given=None, state=None, **options):
    given = trainer() if given is None else given
    state = given.init(PARAMS) if state is None else state
    return given.fit(state, DATA, progress=False, **options)


def test_a_run_that_goes_on_from_a_checkpoint_is_the_same_bit_for_bit(tmp_path):
    whole = fit()
    fit(checkpoint_dir=tmp_path, stop_at=2)
    restored = trainer().init_or_restore(PARAMS, tmp_path)
    assert int(restored.step) == 2
    assert restored.clip_norm != 2.0
    state = fit(state=restored, checkpoint_dir=tmp_path)
    np.testing.assert_array_equal(state.clip_norm, whole.clip_norm)
    np.testing.assert_array_equal(state.params["w"], whole.params["w"])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    recorded = [json.loads(line)["clip_norm"] for line in lines]
    assert len(set(recorded)) == 4
    assert recorded[-1] == float(whole.clip_norm)


@pytest.mark.parametrize("method", ["per_example", "book_keeping"])
def test_both_engines_have_a_clip_norm_that_adapts_and_one_that_is_automatic(method):
    seen, other = [], trainer(method=method)
    assert other.init(PARAMS).clip_norm == 2.0
    fit(other, callback=lambda state: seen.append(float(state.clip_norm)))
    assert len(set(seen)) == 4
    assert all(0.5 < x < 8 for x in seen)
    state = fit(trainer(dpmp.AutomaticClipping(), method))
    assert state.clip_norm is None
    assert state.step == 4
    assert np.isfinite(state.params["w"]).all()


def test_a_run_may_go_on_with_other_settings():
    """They change no cost. The clip norm goes on from where it is."""
    for change in ({"quantile": 0.6}, {"initial": 1.0}):
        other = trainer(dataclasses.replace(ADAPTIVE, **change))
        state = fit(stop_at=2)
        before = float(state.clip_norm)
        state = fit(other, state, stop_at=3)
        assert 0.5 < float(state.clip_norm) / before < 2
        state = fit(other, state)
        assert other.guarantee(state) == other.mechanism.guarantee()


@pytest.mark.parametrize("clipping", [2.0, dpmp.AutomaticClipping()], ids=str)
def test_a_state_of_another_kind_of_clipping_is_refused(clipping):
    adaptive, other = trainer(), trainer(clipping)
    for before, after in ((adaptive, other), (other, adaptive)):
        with pytest.raises(ValueError, match="clip_norm"):
            fit(after, before.init(PARAMS))
