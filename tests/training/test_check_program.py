"""Mistakes in a loss that no exception tells are found in its program."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpmp

DATA = np.ones((8, 3), np.float32)
MECHANISM = dpmp.DPSGD(
    num_examples=8,
    expected_batch_size=4,
    iterations=1,
    l2_clip_norm=1.0,
    noise_multiplier=1.0,
)


def fit(loss_fn, **options):
    trainer = dpmp.DPTrainer(
        mechanism=MECHANISM,
        loss_fn=loss_fn,
        optimizer=optax.sgd(0.1),
        policy="float32",
        **options,
    )
    return trainer.fit(trainer.init({"w": jnp.ones(3)}), DATA, progress=False)


def test_a_loss_that_ignores_its_params_is_refused():
    own = jnp.ones(3)
    with pytest.raises(ValueError, match=r"must compute with the params.*stateless_ca"):
        fit(lambda params, x: jnp.mean(x @ own))


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda params, x: jnp.sum(params["w"]),
        lambda params, x: jax.jit(lambda w: jnp.sum(x @ w))(params["w"]),
        lambda params, x: params["w"][0],
    ],
    ids=["no data", "jit", "entry"],
)
def test_a_loss_that_reads_any_param_is_taken(loss_fn):
    fit(loss_fn)


def drop(w, x, key):
    return jnp.sum(jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0) @ w)


def in_a_loop(params, x):
    def body(total, row):
        return total + drop(params["w"], row, jax.random.key(0)), None

    return jax.lax.scan(body, jnp.zeros(()), x)[0]


@pytest.mark.parametrize(
    "loss_fn",
    [lambda params, x: drop(params["w"], x, jax.random.key(0)), in_a_loop],
    ids=["plain", "loop"],
)
def test_random_numbers_from_a_key_that_never_changes_are_warned_of(loss_fn):
    with pytest.warns(UserWarning, match="the same for every example at every step"):
        fit(loss_fn)


def test_random_numbers_from_the_key_of_the_example_are_welcome():
    fit(lambda params, x, key: drop(params["w"], x, key), uses_prng_key=True)
