import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_runs import KEY, fit, new_trainer, same

from dpmp import Policy
from dpmp.precision import _stochastic_rounding

POLICY = Policy(jnp.bfloat16, jnp.bfloat16, stochastic_rounding=True)


@jax.jit
def _to_bfloat16(x, prng_key):
    like = jnp.zeros(x.shape, jnp.bfloat16)
    rounded = _stochastic_rounding.round_like(x, like, prng_key)
    return rounded.astype(jnp.float32)


def _neighbours(x):
    """The bfloat16 numbers below and above, in magnitude."""
    bits = np.asarray(x, np.float32).view(np.uint32) & 0xFFFF0000
    return bits.view(np.float32), (bits + 0x10000).view(np.float32)


def test_gives_one_of_the_two_neighbours():
    rng = np.random.default_rng(0)
    x = np.float32(rng.normal(size=2000) * 10.0 ** rng.integers(-38, 38, 2000))
    rounded = np.asarray(_to_bfloat16(x, jax.random.key(0)))
    low, high = _neighbours(x)
    is_high = rounded == high
    assert np.all((rounded == low) | is_high)
    assert 0 < is_high.mean() < 1


@pytest.mark.parametrize(
    ("share", "size"), [(0.0, 1.0), (0.125, 1.0), (0.5, -3.0), (0.9, 2.0**-130)]
)
def test_the_mean_is_what_was_rounded(share, size):
    low, high = _neighbours(np.float32(size))
    x = np.float32(low + share * (high - low))
    n = 40_000
    rounded = _to_bfloat16(np.full(n, x), jax.random.key(1))
    went_up = np.mean(np.asarray(rounded) == high)
    exact = (np.float64(x) - low) / (np.float64(high) - low)
    assert abs(went_up - exact) <= 6 * np.sqrt(exact * (1 - exact) / n)


def test_numbers_that_bfloat16_has_stay_and_what_is_not_finite_too():
    exact = [0.0, -0.0, 1.5, -(2.0**-133), 2.0**127, np.inf, -np.inf]
    # The last is closer to 2^128.
    x = np.float32([*exact, np.nan, 3.4e38])
    for seed in range(20):
        rounded = _to_bfloat16(x, jax.random.key(seed))
        np.testing.assert_array_equal(rounded[:-1], x[:-1])
    assert _to_bfloat16(x, jax.random.key(0))[-1] == np.inf


def test_only_bfloat16_parameters_are_rounded():
    policy = Policy(
        jnp.bfloat16, jnp.bfloat16, float32_paths=("norm",), stochastic_rounding=True
    )
    params = policy.cast_to_param({"norm": jnp.ones(3), "w": jnp.ones(3)})
    updates = jax.tree.map(lambda _: jnp.full(3, 2.0**-20), params)
    new = policy.apply_updates(params, updates, jax.random.key(0))
    assert (new["norm"].dtype, new["w"].dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_array_equal(new["norm"], np.full(3, 1 + 2.0**-20, np.float32))
    assert policy.cast_to_compute(params)["norm"].dtype == jnp.float32
    with pytest.raises(ValueError, match="stochastic rounding needs a key"):
        policy.apply_updates(params, updates)


@jax.numpy_dtype_promotion("standard")  # Adam needs it
def test_a_run_keeps_bfloat16_parameters_and_float32_statistics():
    options = {"optimizer": optax.adamw(1e-2), "iterations": 3, "prng_key": KEY}
    trainer = new_trainer(policy=POLICY, **options)
    first, again = fit(trainer), fit(trainer)
    assert first.params["w"].dtype == jnp.bfloat16
    dtypes = {str(x.dtype) for x in jax.tree.leaves(first.opt_state)}
    assert dtypes == {"float32", "int32"}
    assert same(first, again)


def test_every_step_rounds_with_bits_of_its_own():
    def quarter_of_a_unit(grads, state, params):
        return jax.tree.map(lambda x: jnp.full(x.shape, 2.0**-9), grads), state

    trainer = new_trainer(
        loss_fn=lambda w, x: jnp.mean(x @ w),
        optimizer=optax.GradientTransformation(lambda params: (), quarter_of_a_unit),
        policy=POLICY,
        iterations=2,
        prng_key=KEY,
    )
    seen = []
    fit(
        trainer,
        state=trainer.init(jnp.ones(4096)),
        data=np.ones((64, 4096), np.float32),
        callback=lambda state: seen.append(np.float32(state.params)),
    )
    first, second = seen[0] > 1, seen[1] > seen[0]
    # Independent: a sixteenth of all entries moves twice, within six deviations.
    assert abs(np.mean(first & second) - 1 / 16) < 6 * np.sqrt(1 / 16 / 4096)
