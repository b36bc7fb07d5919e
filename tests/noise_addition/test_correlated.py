import functools
from fractions import Fraction

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from dpmp.noise_addition import (
    _add_noise,
    correlated_gaussian_privatizer,
    gaussian_privatizer,
)
from dpmp.noise_addition._discrete_gaussian import DiscreteGaussian
from dpmp.numerics import GridArray
from dpmp.strategies import (
    BandedInverse,
    BandedToeplitz,
    banded_inverse,
    banded_toeplitz,
)

GRID = 2**BandedToeplitz.LOG_GRID
KEY, STEPS, STDDEV = jax.random.key(7), 14, 40_000.0
STRATEGY = banded_toeplitz(5, iterations=STEPS)
INVERSE = banded_inverse(5, iterations=STEPS, steps_per_epoch=8)
SHAPES = {"matrix": (100, 120), "number": ()}
UNIT = 1 / 8


def sums(value, shapes=SHAPES, unit=1.0):
    return {
        name: GridArray(jnp.full(shape, value, jnp.int32), unit)
        for name, shape in shapes.items()
    }


_compiled = functools.cache(jax.jit)


def releases(privatizer, sum_of_step, shapes=SHAPES, steps=STEPS, state=None):
    """The outputs of the first steps, by name."""
    state = state or privatizer.init(sum_of_step(0))
    update, found = _compiled(privatizer.update), []
    for step in range(steps):
        noisy, state = update(sum_of_step(step), state)
        found.append(noisy)
    return {name: np.stack([x[name] for x in found]) for name in shapes}


@pytest.fixture(scope="module", params=[STRATEGY, INVERSE], ids=["bands", "inverse"])
def strategy(request):
    return request.param


@pytest.fixture(scope="module")
def privatizer(strategy):
    return correlated_gaussian_privatizer(
        stddev=STDDEV * UNIT, strategy=strategy, prng_key=KEY
    )


@pytest.fixture(scope="module")
def noise(privatizer):
    return releases(privatizer, lambda step: sums(0, unit=UNIT))


@hypothesis.settings(max_examples=10)
@hypothesis.given(st.data())
def test_releases_are_computed_from_what_the_mechanism_protects(data):
    """X is a function of Y = C G + W, as in the proof, in exact fractions."""
    # Each number of bands is compiled once.
    bands, entries, steps = data.draw(st.sampled_from((1, 2, 5))), 50, 9
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    numerators = (GRID, *rng.integers(-GRID, GRID + 1, size=bands - 1).tolist())
    strategy = object.__new__(BandedToeplitz)  # of any noise gain
    values = {"coefficients": tuple(x / GRID for x in numerators), "iterations": steps}
    for name, value in values.items():
        object.__setattr__(strategy, name, value)
    scale = 10 ** data.draw(st.integers(0, 6))
    grads, units = (rng.integers(-scale, scale + 1, (steps, entries)) for _ in "gu")
    fractions = rng.integers(-4000, 4001, (steps, entries))
    drawn = GRID * units + fractions
    past = jnp.zeros((bands - 1, entries), jnp.int32)
    released, protected = [], []
    for step in range(steps):
        both = (jnp.asarray(x[step], jnp.int32) for x in (units, fractions))
        correlated = _add_noise._correlated(*both, past, jnp.int32(step), strategy)
        if bands > 1:
            past = past.at[step % (bands - 1)].set(correlated)
        released.append(grads[step] + np.asarray(correlated, np.int64))
        of_grads = sum(
            numerators[k] * grads[step - k] for k in range(min(bands, step + 1))
        )
        protected.append(of_grads + drawn[step])  # in multiples of 1 / GRID
        rest = protected[step] - sum(
            numerators[k] * released[step - k] for k in range(1, min(bands, step + 1))
        )
        replayed = [(Fraction(int(x), GRID) + Fraction(1, 2)).__floor__() for x in rest]
        np.testing.assert_array_equal(released[step], replayed)


def test_noise_of_an_inverse_is_rounded_from_its_draws():
    """In exact fractions; each step has a key of its own, and the run goes on once."""
    earlier = 1
    strategy = BandedInverse((1.0, -0.5, -0.25), STEPS, 8)
    privatizer = correlated_gaussian_privatizer(stddev=STDDEV, strategy=strategy)
    units = DiscreteGaussian.at_least(Fraction(STDDEV) * Fraction(strategy.sensitivity))
    fractions = _add_noise._WIDE_FRACTIONS
    # The condition of docs/proofs.md, for the narrowest noise.
    assert 1 / 256**2 + (2 * 4096) ** 2 / fractions.variance <= 1 / 4
    state, update, drawn = privatizer.init({"a": 0}), jax.jit(privatizer.update), {}

    @jax.jit
    def sample(words, step):
        return [
            x.sample(words, (1,), step=step, leaf=leaf)[0]
            for leaf, x in enumerate((units, fractions))
        ]

    for step in range(7):
        if step == 4:  # a new sequence
            state, earlier = privatizer.init({"a": 0})._replace(step=state.step), step
        state = state._replace(prng_key=jax.random.key(step, impl="threefry4x32"))
        noisy, state = update(sums(step, {"a": ()}), state)
        words = jax.random.key_data(jax.random.key(step, impl="threefry4x32"))
        drawn[step], rest = map(int, sample(words, jnp.int32(step)))
        exact = Fraction(rest, 4096) + sum(
            Fraction(c) * drawn[step - k]
            for k, c in enumerate(strategy.coefficients)
            if step - k >= (earlier if step >= 4 else 0)
        )
        expected = step + (exact + Fraction(1, 2)).__floor__()
        assert int(noisy["a"]) == int(np.float32(expected))


def test_the_sum_moves_the_release_and_not_the_noise(privatizer, noise):
    steps = 7  # more than there are bands
    moved = releases(privatizer, lambda step: sums(17 * step, unit=UNIT), steps=steps)
    for name, x in noise.items():
        expected = 17 * UNIT * np.arange(steps).reshape(-1, *[1] * (x.ndim - 1))
        difference = np.float64(moved[name]) - np.float64(x[:steps])
        np.testing.assert_array_equal(
            difference, np.broadcast_to(expected, difference.shape)
        )


def test_noise_has_the_covariance_of_the_strategy(strategy, noise):
    inverse = strategy.quotient(np.eye(STEPS))
    expected = inverse @ inverse.T * (STDDEV * UNIT * strategy.sensitivity) ** 2
    x = noise["matrix"].reshape(STEPS, -1).astype(float)
    found = x @ x.T / x.shape[1]
    diagonal = np.diag(expected)
    # The deviation of a covariance, for independent entries.
    deviation = np.sqrt((np.outer(diagonal, diagonal) + expected**2) / x.shape[1])
    assert np.all(np.abs(found - expected) < 6 * deviation)
    for wrong in (1.1 * expected, np.diag(diagonal)):
        assert np.any(np.abs(found - wrong) > 6 * deviation)


def test_one_band_is_independent_noise():
    one, other = (
        make(stddev=STDDEV, prng_key=KEY, **options)
        for make, options in (
            (gaussian_privatizer, {}),
            (
                correlated_gaussian_privatizer,
                {"strategy": BandedToeplitz((1.0,), STEPS)},
            ),
        )
    )
    shapes = {"matrix": (4, 30), "number": ()}
    found = [
        releases(x, lambda step: sums(step, shapes), shapes, steps=3)
        for x in (one, other)
    ]
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_devices_share_the_noise(privatizer, noise):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), axis_types=auto, devices=jax.devices()[:2])

    def place(x):  # of which the last axis is divided
        spec = jax.P(*[None] * (x.ndim - 1), "data") if x.ndim else jax.P()
        return jax.device_put(x, jax.NamedSharding(mesh, spec))

    def sharded(step):
        return jax.tree.map(place, sums(0, unit=UNIT))

    state = privatizer.init(sharded(0))
    if state.past[0].dtype == jnp.int32:
        state = state._replace(past=tuple(map(place, state.past)))
    for name, x in releases(privatizer, sharded, steps=3, state=state).items():
        np.testing.assert_array_equal(x, noise[name][:3])


def test_nothing_is_released_after_the_last_step(privatizer):
    state = privatizer.init({name: jnp.zeros(x) for name, x in SHAPES.items()})
    update, total = _compiled(privatizer.update), sums(0, unit=UNIT)
    for step, is_released in ((STEPS - 1, True), (STEPS, False), (2**30, False)):
        noisy, _ = update(total, state._replace(step=jnp.int32(step)))
        for x in noisy.values():
            assert np.all(np.isfinite(x)) == is_released
            assert np.all(np.isnan(x)) != is_released


def test_what_has_no_noise_is_refused(privatizer):
    floats = {"a": jnp.zeros(3)}
    with pytest.raises(ValueError, match="must be added to sums on a grid"):
        privatizer.update(floats, privatizer.init(floats))
    slow = BandedToeplitz((1.0, 0.98), 1000)
    wide = correlated_gaussian_privatizer(stddev=1.5e7, strategy=slow, prng_key=KEY)
    total = sums(0, {"a": (3,)}, unit=0.5)
    for both in (total, total | {"b": GridArray(jnp.zeros(3, jnp.int32), 0.0)}):
        with pytest.raises(ValueError, match="at most 134217728 units"):
            wide.update(both, wide.init(jax.tree.map(jnp.zeros_like, both)))
    state = privatizer.init({"a": jnp.zeros(3)})
    of_floats = (state.past[0].astype(jnp.float32),)
    for past in ((), (state.past[0][1:],), state.past * 2, of_floats):
        with pytest.raises(ValueError, match="the noise of earlier steps for this"):
            privatizer.update(sums(0, {"a": (3,)}), state._replace(past=past))
    with pytest.raises(ValueError, match="banded_toeplitz"):
        correlated_gaussian_privatizer(stddev=1.0, strategy=8)
    with pytest.raises(ValueError, match="stddev must be"):
        correlated_gaussian_privatizer(stddev=-1.0, strategy=STRATEGY)
    silent = correlated_gaussian_privatizer(stddev=0.0, strategy=STRATEGY)
    noisy, _ = silent.update(sums(5), silent.init(SHAPES))
    assert float(noisy["number"]) == 5.0
