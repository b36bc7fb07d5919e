import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpmp import DPSGD, DPTrainer, Policy
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


def test_small_updates_count_on_average_and_are_lost_without():
    params = np.ones(4096, jnp.bfloat16)
    update = np.full(4096, 2.0**-12, np.float32)  # a 32nd of a unit in the last place

    def step(params, i):
        key_of_step = jax.random.fold_in(jax.random.key(2), i)
        return POLICY.apply_updates(params, update, key_of_step), None

    moved, _ = jax.jit(lambda x: jax.lax.scan(step, x, jnp.arange(64)))(params)
    assert moved.dtype == jnp.bfloat16
    mean = np.mean(np.float32(moved))
    # Of 64 steps: deviation below sqrt(64 * 4096) / 4096 units of 2^-7 / 4, six times.
    assert abs(mean - (1 + 64 * 2.0**-12)) < 6 * 8 / 64 * 2.0**-7 / 4
    nearest = (np.float32(params) + update).astype(jnp.bfloat16)
    assert np.all(nearest == params)


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


def _trainer(policy, optimizer):
    return DPTrainer(
        mechanism=DPSGD(
            num_examples=64,
            expected_batch_size=16,
            iterations=3,
            l2_clip_norm=1.0,
            noise_multiplier=1.0,
        ),
        loss_fn=lambda w, x: jnp.mean((x @ w - 1).astype(jnp.float32) ** 2),
        optimizer=optimizer,
        policy=policy,
        prng_key=jax.random.key(0),
    )


def _fit(trainer):
    data = np.random.default_rng(0).normal(size=(64, 5)).astype(np.float32)
    with jax.numpy_dtype_promotion("standard"):  # Adam needs it
        return trainer.fit(trainer.init(jnp.zeros(5)), data, progress=False)


def test_a_run_keeps_bfloat16_parameters_and_float32_statistics():
    trainer = _trainer(POLICY, optax.adamw(1e-2))
    first, again = _fit(trainer), _fit(trainer)
    assert first.params.dtype == jnp.bfloat16
    dtypes = {str(x.dtype) for x in jax.tree.leaves(first.opt_state)}
    assert dtypes == {"float32", "int32"}
    np.testing.assert_array_equal(
        first.params.astype(jnp.float32), again.params.astype(jnp.float32)
    )


def test_every_step_rounds_with_bits_of_its_own():
    def quarter_of_a_unit(grads, state, params):
        return jax.tree.map(lambda x: jnp.full(x.shape, 2.0**-9), grads), state

    optimizer = optax.GradientTransformation(lambda params: (), quarter_of_a_unit)
    trainer = _trainer(POLICY, optimizer)
    seen = []
    trainer.fit(
        trainer.init(jnp.ones(4096)),
        np.ones((64, 4096), np.float32),
        callback=lambda state: seen.append(np.float32(state.params)),
        progress=False,
    )
    first, second = seen[0] > 1, seen[1] > seen[0]
    # Independent: a sixteenth of all entries moves twice, within six deviations.
    assert abs(np.mean(first & second) - 1 / 16) < 6 * np.sqrt(1 / 16 / 4096)


def test_an_update_without_a_key_is_refused():
    params = POLICY.cast_to_param(jnp.ones(3))
    with pytest.raises(ValueError, match="stochastic rounding needs a key"):
        POLICY.apply_updates(params, jnp.ones(3))


def test_optimizers_keep_the_low_precision_state_that_they_were_told_to():
    optimizer = optax.adam(1e-2, mu_dtype=jnp.bfloat16)
    trainer = _trainer(Policy.from_name("mixed_bfloat16"), optimizer)
    state = _fit(trainer)
    dtypes = {x.dtype for x in jax.tree.leaves(state.opt_state) if x.shape}
    assert jnp.dtype(jnp.bfloat16) in dtypes
    assert state.params.dtype == jnp.float32
    assert jnp.any(state.params != 0)
