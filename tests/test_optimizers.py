"""Adam that subtracts the noise finds the second moments that are without noise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpmp
from dpmp.optimizers import dp_adam

PARAMS = {"w": jnp.zeros(4), "b": jnp.zeros(())}


def mechanism(**fields):
    return dpmp.DPSGD(
        **{
            "num_examples": 64,
            "expected_batch_size": 16,
            "iterations": 4,
            "l2_clip_norm": 2.0,
            "noise_multiplier": 1.0,
            "delta": 1e-5,
            **fields,
        }
    )


def updates_of(optimizer, gradients, params):
    def step(state, gradient):
        update, state = optimizer.update(gradient, state)
        return state, update

    with jax.numpy_dtype_promotion("standard"):  # for optax.adam
        return jax.lax.scan(step, optimizer.init(params), gradients)[1]


def test_without_noise_it_is_adam():
    rng = np.random.default_rng(0)
    gradients = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=(5, *x.shape)), jnp.float32), PARAMS
    )
    schedule = optax.linear_schedule(0.1, 0.0, 5)
    for of_mechanism in (mechanism().without_privacy(), mechanism(noise_multiplier=0)):
        optimizer = dp_adam(schedule, of_mechanism, b1=0.8, b2=0.99)
        actual = updates_of(optimizer, gradients, PARAMS)
        adam = optax.adam(schedule, b1=0.8, b2=0.99)
        expected = updates_of(adam, gradients, PARAMS)
        # A few roundings of float32.
        same = functools.partial(np.testing.assert_allclose, rtol=16 * 2.0**-24)
        jax.tree.map(same, actual, expected)


@pytest.mark.parametrize("clip_norm", [2.0, "adaptive", "automatic"])
def test_noise_is_subtracted_and_the_rest_is_floored(clip_norm):
    clippings = {
        "adaptive": dpmp.AdaptiveClipNorm(initial=1.0, norm_share=0.5),
        "automatic": dpmp.AutomaticClipping(),
    }
    bound = {2.0: 2.0, "adaptive": np.hypot(1, 0.5), "automatic": 1.0}[clip_norm]
    of_run = mechanism(
        l2_clip_norm=clippings.get(clip_norm, clip_norm),
        rescale_to_unit_norm=clip_norm == "adaptive",
    )
    noise = bound / 16
    optimizer = dp_adam(1.0, of_run, floor=0.25)
    gradient = jnp.array([10.0, 2.0, 1.0, 0.0]) * noise
    update = updates_of(optimizer, gradient[None], jnp.zeros(4))[0]
    # Roots of 100 - 1 and of 4 - 1, and twice the floor.
    expected = -np.array([10 / 99**0.5, 2 / 3**0.5, 1 / 0.5, 0])
    np.testing.assert_allclose(update, expected, rtol=1e-5)


def test_it_scales_a_noisy_gradient_as_adam_scales_the_gradient_alone():
    of_run, size = mechanism(), 4000
    noise = of_run.stddev * jax.random.normal(jax.random.key(0), (300, size))
    signal = jnp.full((300, size), 2 * of_run.stddev)
    zeros = jnp.zeros(size)
    optimizers = {"dp_adam": dp_adam(1.0, of_run), "adam": optax.adam(1.0)}
    mean = {
        name: float(jnp.mean(updates_of(x, signal + noise, zeros)[-1]))
        for name, x in optimizers.items()
    }
    assert abs(mean["dp_adam"] + 1) < 0.01  # the step of Adam without noise
    assert abs(mean["adam"] + 2 / 5**0.5) < 0.01


def test_a_run_trains_with_it():
    of_run = mechanism()
    trainer = dpmp.DPTrainer(
        mechanism=of_run,
        loss_fn=lambda w, x: jnp.mean((x @ w - 1.0) ** 2),
        optimizer=dp_adam(0.1, of_run),
        policy="float32",
        prng_key=jax.random.key(0),
    )
    state = trainer.init(jnp.zeros(3))
    state = trainer.fit(state, np.ones((64, 3), np.float32), progress=False)
    assert state.step == 4
    assert np.all(np.asarray(state.params) > 0)
