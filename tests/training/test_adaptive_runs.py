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
from dpmp.training._same_run import NO_FACTS, origin_of

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
    )


def init(trainer=None):
    return (trainer or globals()["trainer"]()).init(PARAMS, prng_key=jax.random.key(0))


def fit(state, trainer=None, **options):
    trainer = trainer or globals()["trainer"]()
    return trainer.fit(state, DATA, progress=False, **options)


def test_a_run_that_goes_on_from_a_checkpoint_is_the_same_bit_for_bit(tmp_path):
    whole = fit(init())
    fit(init(), checkpoint_dir=tmp_path, stop_at=2)
    restored = trainer().init_or_restore(PARAMS, tmp_path)
    assert int(restored.step) == 2
    assert restored.clip_norm != 2.0
    state = fit(restored, checkpoint_dir=tmp_path)
    np.testing.assert_array_equal(state.clip_norm, whole.clip_norm)
    np.testing.assert_array_equal(state.params["w"], whole.params["w"])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    recorded = [json.loads(line)["clip_norm"] for line in lines]
    assert len(set(recorded)) == 4
    assert recorded[-1] == float(whole.clip_norm)


@pytest.mark.parametrize("method", ["per_example", "book_keeping"])
def test_both_engines_have_a_clip_norm_that_adapts(method):
    other = trainer(method=method)
    state = init(other)
    assert state.clip_norm == 2.0
    seen = []
    fit(state, other, callback=lambda state: seen.append(float(state.clip_norm)))
    assert len(set(seen)) == 4
    assert all(0.5 < x < 8 for x in seen)


@pytest.mark.parametrize(
    "change",
    [{"quantile": 0.6}, {"learning_rate": 0.1}, {"norm_share": 0.2}, {"initial": 1.0}],
    ids=str,
)
def test_a_run_with_other_settings_is_refused(change):
    other = trainer(dataclasses.replace(ADAPTIVE, **change))
    with pytest.raises(ValueError, match=r"another l2_clip_norm.*AdaptiveClipNorm"):
        fit(init(), other)


def test_other_clippings_are_other_runs():
    for clipping in (2.0, dpmp.AutomaticClipping()):
        with pytest.raises(ValueError, match="another l2_clip_norm"):
            fit(init(), trainer(clipping))
    automatic = trainer(dpmp.AutomaticClipping())
    with pytest.raises(ValueError, match=r"another l2_clip_norm.*stability=0.02"):
        fit(init(automatic), trainer(dpmp.AutomaticClipping(stability=0.02)))


def test_a_clip_norm_that_was_edited_is_another_origin():
    # Two runs with one key and different origins are charged for one after the other.
    state = init()
    edited = state._replace(clip_norm=jnp.float32(3.0))
    one, two = (origin_of(x, NO_FACTS["origin"]) for x in (state, edited))
    assert not np.array_equal(one, two)


def test_automatic_clipping_trains_with_both_engines():
    for method in ("per_example", "book_keeping"):
        automatic = trainer(dpmp.AutomaticClipping(), method)
        state = init(automatic)
        assert state.clip_norm is None
        state = fit(state, automatic)
        assert state.step == 4
        assert np.isfinite(state.params["w"]).all()
