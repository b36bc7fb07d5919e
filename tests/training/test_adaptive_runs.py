"""Runs whose clip norm adapts: it is a released part of the state, and is resumed."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from small_runs import KEY, PARAMS, fit, new_trainer, same

import dpmp
from dpmp.runs import read_metrics

ADAPTIVE = dpmp.AdaptiveClipNorm(initial=2.0)


@functools.cache
def trainer(adaptive=ADAPTIVE, method="per_example"):
    return new_trainer(l2_clip_norm=adaptive, method=method, prng_key=KEY)


def test_a_run_that_goes_on_from_a_checkpoint_is_the_same_bit_for_bit(tmp_path):
    whole = fit(trainer())
    fit(trainer(), tmp_path, stop_at=2)
    restored = trainer().init_or_restore(PARAMS, tmp_path)
    assert int(restored.step) == 2
    assert restored.clip_norm != 2.0
    assert same(fit(trainer(), tmp_path, state=restored), whole)
    recorded = [x["clip_norm"] for x in read_metrics(tmp_path)]
    assert len(set(recorded)) == 7
    assert all(0.3 < x < 8 for x in recorded)
    assert recorded[-1] == float(whole.clip_norm)


def test_book_keeping_has_a_clip_norm_that_adapts_and_one_that_is_automatic():
    method = "book_keeping"
    seen, other = [], trainer(method=method)
    assert other.init(PARAMS).clip_norm == 2.0
    fit(other, callback=lambda state: seen.append(float(state.clip_norm)))
    assert len(set(seen)) == 7
    assert all(0.3 < x < 8 for x in seen)
    state = fit(trainer(dpmp.AutomaticClipping(), method))
    assert state.clip_norm is None
    assert state.step == 7
    assert np.isfinite(state.params["w"]).all()


def test_a_run_may_go_on_with_other_settings():
    """They change no cost. The clip norm goes on from where it is."""
    other = trainer(dataclasses.replace(ADAPTIVE, quantile=0.6, initial=0.01))
    state = fit(trainer(), stop_at=2)
    before = float(state.clip_norm)
    state = fit(other, state=state, stop_at=3)
    assert 0.5 < float(state.clip_norm) / before < 2
    state = fit(other, state=state)
    assert other.guarantee(state) == other.mechanism.guarantee()


def test_a_step_clips_by_the_norm_of_its_state():
    """All gradients exceed the first norm and none the second; the noise is equal."""
    factors = []
    for norm in (1e-3, 1e3):
        state = trainer().init(PARAMS)._replace(clip_norm=jnp.float32(norm))
        state = fit(trainer(), state=state, stop_at=1)
        factors.append(float(state.clip_norm) / norm)
    assert factors[0] > 1.1 * factors[1]
