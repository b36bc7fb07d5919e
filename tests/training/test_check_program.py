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
        **{"policy": "float32", **options},
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


STATE = jnp.ones(3)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda params, x: (0.9 * STATE + x[0], jnp.sum(x @ params["w"]))[1],
        lambda params, x: (jax.jit(jnp.add)(STATE, x[0]), jnp.sum(x @ params["w"]))[1],
    ],
    ids=["plain", "jit"],
)
def test_a_next_state_that_is_dropped_is_warned_of(loss_fn):
    said = r"new values of 1 arrays .* of the shapes \(3,\), and drops them"
    with pytest.warns(UserWarning, match=said):
        fit(loss_fn)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda params, x: jnp.sum((x * STATE) @ params["w"]),
        lambda params, x: (STATE + 1, jnp.sum(x @ params["w"]))[1],
        lambda params, x: (x * STATE, jnp.sum(x @ params["w"]))[1],
    ],
    ids=["used", "of no example", "of another shape"],
)
def test_other_arrays_that_a_loss_closes_over_are_welcome(loss_fn):
    fit(loss_fn)


WIDE = np.ones(3, np.float32)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_loss_without_any_product_in_the_16_bits_of_the_policy_is_warned_of(policy):
    def loss_fn(params, x):
        return jnp.sum(x.astype(jnp.float32) @ params["w"].astype(jnp.float32))

    with pytest.warns(UserWarning, match="computes no product in b?float16, though"):
        fit(loss_fn, policy=policy, loss_scale=2.0)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda params, x: jnp.sum(x @ params["w"]),
        lambda params, x: (
            jnp.sum(x @ params["w"]).astype(jnp.float32)
            + jnp.sum(x.astype(jnp.float32) @ WIDE)
        ),
        lambda params, x: jnp.sum((x * params["w"]).astype(jnp.float32)),
        lambda params, x: jnp.sum(
            jnp.einsum("bi,i", x, params["w"], preferred_element_type=jnp.float32)
        ),
    ],
    ids=["plain", "one of two", "no product", "summed in float32"],
)
def test_a_loss_with_a_product_in_16_bits_or_none_at_all_is_welcome(loss_fn):
    fit(loss_fn, policy="mixed_bfloat16")


def test_random_numbers_from_the_key_of_the_example_are_welcome():
    fit(lambda params, x, key: drop(params["w"], x, key), uses_prng_key=True)
