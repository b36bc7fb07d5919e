"""That averages in 8 bits keep their means, and an optimizer on its way."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_runs import KEY, fit, new_trainer

import dpmp
from dpmp.precision import _eight_bits

_rounded = jax.jit(
    lambda x, key: _eight_bits._widened(_eight_bits._to_eight_bits(x, key))
)
_MORE_SHAPES = [(8192,), (5000, 1), (2, 3, 700)]
_SHAPES = [(64, 64), *(pytest.param(x, marks=pytest.mark.slow) for x in _MORE_SHAPES)]


def _numbers(shape, seed=0):
    """Of many sizes, with zeros among them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp2(rng.uniform(-8, 0, shape))
    return jnp.asarray(np.where(rng.random(shape) < 0.1, 0, x), jnp.float32)


@pytest.mark.parametrize("shape", _SHAPES)
def test_rounding_is_to_a_neighbour_and_keeps_the_mean(shape):
    x = _numbers(shape)
    keys = jax.random.split(jax.random.key(0), 400)
    many = jax.vmap(_rounded, (None, 0))(x, keys)
    largest = float(jnp.max(jnp.abs(x)))
    # Steps are 2 / 127 at most.
    assert np.max(np.abs(many - x)) <= 2 / 127 * largest
    spread = np.std(many, axis=0) / 20
    smallest = largest / 127**2  # what is below becomes this
    error = np.abs(np.mean(many, axis=0) - x)
    assert np.mean(error <= 4 * spread + smallest) > 0.999
    np.testing.assert_array_equal(np.sign(many), np.sign(x)[None] + 0 * many)


def test_nothing_but_zero_becomes_zero_and_what_is_not_finite_stays_so():
    x = np.ones((3, 128), np.float32)
    x[0, 5] = np.nan
    x[2] = np.resize([1.0, 1e-12, -1e-12, 0], 128)
    found = _rounded(x, jax.random.key(0))
    assert np.all(np.isnan(found[0]))
    np.testing.assert_array_equal(found[1], 1)
    np.testing.assert_allclose(found[2, :4], [1, 1 / 127**2, -1 / 127**2, 0])


def _quadratic(optimizer, steps=300):
    """The distance to the minimum that is left, with noisy gradients."""
    target = jnp.linspace(-1, 1, 4096).reshape(32, 128)
    noise = jax.random.normal(jax.random.key(1), (steps, 32, 128))

    def body(carry, z):
        params, state = carry
        updates, state = optimizer.update(params - target + z, state, params)
        return (optax.apply_updates(params, updates), state), None

    start = jnp.zeros_like(target)
    (params, _), _ = jax.lax.scan(body, (start, optimizer.init(start)), noise)
    return jnp.sqrt(jnp.mean(jnp.square(params - target)))


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adam(optax.linear_schedule(0.02, 0.0, 300)),
        pytest.param(
            optax.chain(optax.clip_by_global_norm(1e3), optax.adamw(0.01)),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["adam", "chain"],
)
@jax.numpy_dtype_promotion("standard")  # optax needs it
def test_an_optimizer_ends_where_it_does_in_float32(optimizer):
    both = optimizer, dpmp.in_8_bits(optimizer)
    wide, narrow = jax.jit(lambda: [*map(_quadratic, both)])()
    assert narrow < 1.05 * wide
    assert narrow != wide


def test_small_arrays_and_other_parts_of_a_state_stay_as_they_are():
    optimizer = optax.chain(
        optax.masked(optax.adam(0.1), {"large": True, "small": True}),
        optax.ema(0.9),
        optax.contrib.schedule_free_adamw(0.1),
        optax.trace(0.9),
    )
    params = {"large": jnp.ones((64, 64)), "small": jnp.ones(64)}
    state = jax.eval_shape(dpmp.in_8_bits(optimizer).init, params).inner
    assert state[2].z["large"].dtype == jnp.float32
    averages = state[0].inner_state[0]
    assert averages.mu["large"].codes.dtype == jnp.int8
    assert averages.nu["large"].sizes.shape == (32,)
    assert averages.mu["small"].dtype == jnp.float32
    assert state[1].ema["large"].dtype == jnp.float32
    assert state[3].trace["large"].codes.dtype == jnp.int8


@pytest.mark.slow
def test_an_explicit_mesh_divides_it():
    mesh = jax.make_mesh((2,), ("m",), axis_types=(jax.sharding.AxisType.Explicit,))
    for spec in (jax.P("m"), jax.P(None, "m")):
        for shape in ((128, 64), (32, 256)):
            params = jax.device_put(jnp.ones(shape), jax.NamedSharding(mesh, spec))
            state = dpmp.in_8_bits(optax.scale_by_adam()).init(params)
            assert (
                state.inner.mu.codes.sharding.spec == jax.typeof(params).sharding.spec
            )


@jax.numpy_dtype_promotion("standard")  # optax needs it
def test_a_trainer_takes_it_and_a_run_can_be_resumed(tmp_path):
    trainer = new_trainer(
        loss_fn=lambda w, x: jnp.mean(jnp.square(x @ w)),
        optimizer=dpmp.in_8_bits(optax.adam(0.1)),
        prng_key=KEY,
        iterations=4,
    )
    data = np.ones((64, 64), np.float32)
    for stop in (3, 4):
        new = trainer.init(jnp.zeros((64, 128)))
        state = fit(trainer, tmp_path, state=new, data=data, stop_at=stop)
        assert state.step == stop
    codes = [x for x in jax.tree.leaves(state.opt_state) if x.dtype == jnp.int8]
    assert [x.shape for x in codes] == [(64, 128)] * 2


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (1.0, "optimizer must be a GradientTransformation"),
        (optax.sgd(0.1), "the optimizer must keep averages"),
    ],
)
def test_what_has_no_averages_is_refused(optimizer, message):
    with pytest.raises(ValueError, match=message):
        dpmp.in_8_bits(optimizer).init(jnp.ones(8192))
    with pytest.warns(UserWarning, match="changes nothing: no average has 4096 entri"):
        dpmp.in_8_bits(optax.adam(1e-3)).init({"w": jnp.zeros(4095)})
