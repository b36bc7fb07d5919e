import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import dpmp
from dpmp.noise_addition import NoiseState, gaussian_privatizer

KEY = jax.random.key(20240607)
NUM_DRAWS = 100_000
# With fixed keys nothing flakes; this is for the day on which a key changes.
SMALLEST_P_VALUE = 1e-6


def draw(stddev=1.0, shape=(NUM_DRAWS,), *, key=KEY, step=0, dtype=jnp.float32):
    """The noise alone: what is released for a sum of zeros."""
    privatizer = gaussian_privatizer(stddev=stddev, prng_key=key)
    state = NoiseState(key, jnp.asarray(step, jnp.int32))
    noisy, _ = privatizer.update(jnp.zeros(shape, dtype), state)
    return np.asarray(noisy, np.float64)


def has_stddev(samples, stddev):
    """A two-sided chi-square test of the scale of normals of mean zero."""
    statistic = np.sum(np.square(samples / stddev))
    tail = min(
        stats.chi2.cdf(statistic, samples.size), stats.chi2.sf(statistic, samples.size)
    )
    return 2 * tail > SMALLEST_P_VALUE


def are_uncorrelated(x, y):
    x, y = x.ravel(), y.ravel()
    z = np.sum(x * y) / np.sqrt(np.sum(x**2) * np.sum(y**2)) * np.sqrt(x.size)
    return abs(z) < 5


@pytest.mark.parametrize("stddev", [1e-6, 0.3, 1.0, 250.0])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_the_noise_has_the_given_scale_and_no_other(stddev, dtype):
    noise = draw(stddev, dtype=dtype)
    assert has_stddev(noise, stddev)
    for factor in (0.7, 0.95, 1.05, 1.3):
        assert not has_stddev(noise, factor * stddev)


def test_the_noise_has_mean_zero():
    mean = np.mean(draw(3.0))
    assert abs(mean) < 5 * 3.0 / np.sqrt(NUM_DRAWS)


def test_the_noise_is_gaussian():
    assert stats.kstest(draw(), "norm").pvalue > SMALLEST_P_VALUE
    for other in (
        np.random.default_rng(0).uniform(-(3**0.5), 3**0.5, NUM_DRAWS),
        np.random.default_rng(0).laplace(0, 0.5**0.5, NUM_DRAWS),
        np.asarray(jax.random.normal(KEY, (NUM_DRAWS,), jnp.bfloat16), np.float64),
    ):
        assert stats.kstest(other, "norm").pvalue < SMALLEST_P_VALUE


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=str)
def test_the_noise_has_as_many_values_as_float32_can_tell_apart(dtype):
    # Half-precision generators give 128 (bfloat16) or 1024 (float16) values.
    assert len(np.unique(draw(dtype=dtype))) > 0.98 * NUM_DRAWS


def test_entries_of_a_leaf_are_independent():
    noise = draw()
    assert are_uncorrelated(noise[1:], noise[:-1])
    assert are_uncorrelated(noise[: NUM_DRAWS // 2], noise[NUM_DRAWS // 2 :])
    assert not are_uncorrelated(noise, noise + 50 * draw(step=1))


def test_leaves_of_one_shape_are_independent():
    privatizer = gaussian_privatizer(stddev=1.0, prng_key=KEY)
    zeros = {name: jnp.zeros(NUM_DRAWS) for name in "abc"}
    noisy, _ = privatizer.update(zeros, privatizer.init(zeros))
    noise = {name: np.asarray(x, np.float64) for name, x in noisy.items()}
    for first, second in ("ab", "ac", "bc"):
        assert are_uncorrelated(noise[first], noise[second])
        assert not np.any(noise[first][:1000] == noise[second][:1000])


def test_steps_are_independent():
    noise = [draw(step=step) for step in (0, 1, 2, 2**31 - 1)]
    for i in range(len(noise)):
        for j in range(i):
            assert are_uncorrelated(noise[i], noise[j])


def test_keys_are_independent():
    assert are_uncorrelated(draw(), draw(key=jax.random.key(1)))


def test_the_noise_is_a_function_of_key_and_step():
    np.testing.assert_array_equal(draw(step=5), draw(step=5))
    assert np.all(draw(step=5)[:100] != draw(step=6)[:100])
    assert np.all(draw(key=jax.random.key(1))[:100] != draw()[:100])


def test_the_noise_of_a_leaf_does_not_depend_on_the_sum():
    sums = np.float32([0.0, 1.0, -3.0, 1024.0])
    privatizer = gaussian_privatizer(stddev=1e6, prng_key=KEY)
    state = privatizer.init(sums)
    alone, _ = privatizer.update(jnp.zeros(4), state)
    noisy, _ = privatizer.update((jnp.asarray(sums), jnp.ones(3)), state)
    # Float32 numbers near 1e6 are 1/16 apart, or less.
    np.testing.assert_allclose(noisy[0] - alone, sums, rtol=0, atol=1 / 16)


def test_the_step_is_counted_and_the_root_key_kept():
    privatizer = gaussian_privatizer(stddev=1.0, prng_key=KEY)
    state = privatizer.init(jnp.zeros(3))
    assert state.step == 0
    for step in range(3):
        noisy, state = privatizer.update(jnp.zeros(3), state)
        np.testing.assert_array_equal(noisy, draw(shape=(3,), step=step))
        assert state.step == step + 1
    assert jnp.all(jax.random.key_data(state.prng_key) == jax.random.key_data(KEY))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=str)
def test_the_output_is_float32(dtype):
    privatizer = gaussian_privatizer(stddev=1.0, prng_key=KEY)
    total = {"w": jnp.ones((2, 3), dtype), "b": jnp.ones((), dtype)}
    noisy, _ = privatizer.update(total, privatizer.init(total))
    assert jax.tree.map(lambda x: x.dtype, noisy) == {
        "w": jnp.float32,
        "b": jnp.float32,
    }
    assert noisy["w"].shape == (2, 3)


def test_a_float64_sum_meets_float64_noise():
    with jax.enable_x64(True):
        privatizer = gaussian_privatizer(stddev=1.0, prng_key=KEY)
        state = privatizer.init(None)
        noise, _ = privatizer.update(jnp.zeros(1000, jnp.float64), state)
        lowest_bits = 2.0**-45
        noisy, _ = privatizer.update(jnp.full(1000, lowest_bits, jnp.float64), state)
        assert noise.dtype == noisy.dtype == jnp.float64
        assert np.mean(np.float32(noise) != np.asarray(noise)) > 0.99
        # Float64 numbers below 8 are at most 2^-50 apart.
        np.testing.assert_allclose(noisy - noise, lowest_bits, rtol=0, atol=2.0**-50)


@pytest.mark.parametrize("sum_dtype", ["float32", "float64"])
@pytest.mark.parametrize("noise_dtype", ["float32", "float64"])
def test_the_output_is_as_wide_as_sum_and_noise(sum_dtype, noise_dtype):
    with jax.enable_x64(True):
        privatizer = gaussian_privatizer(stddev=1.0, prng_key=KEY, dtype=noise_dtype)
        total = jnp.zeros(1000, sum_dtype)
        noisy, _ = privatizer.update(total, privatizer.init(total))
        assert noisy.dtype == max(sum_dtype, noise_dtype)
        is_narrow = np.float32(noisy) == np.asarray(noisy)
        assert np.all(is_narrow) == (noise_dtype == "float32")


@pytest.mark.parametrize("is_jitted", [False, True])
@pytest.mark.parametrize("stddev", [1.0, 0.3])
def test_both_words_meet_the_noise_before_rounding(stddev, is_jitted):
    privatizer = gaussian_privatizer(stddev=stddev, prng_key=KEY)
    update = jax.jit(privatizer.update) if is_jitted else privatizer.update
    state = privatizer.init(jnp.zeros(1000))
    noise, _ = update(jnp.zeros(1000), state)
    # Rounded to float32 alone, hi + lo would be hi, and the result zero.
    hi, lo = -noise, noise * jnp.float32(2.0**-30)
    noisy, _ = update({"w": dpmp.DoubleWord(hi, lo)}, state)
    assert noisy["w"].dtype == jnp.float32
    np.testing.assert_array_equal(hi + lo, hi)
    np.testing.assert_array_equal(noisy["w"], lo)


@pytest.mark.parametrize("is_jitted", [False, True])
def test_double_words_and_noise_are_rounded_once(is_jitted):
    rng = np.random.default_rng(1)
    privatizer = gaussian_privatizer(stddev=0.3, prng_key=KEY)
    update = jax.jit(privatizer.update) if is_jitted else privatizer.update
    state = privatizer.init(None)
    noise, _ = update(jnp.zeros(10_000), state)
    hi = rng.normal(size=10_000).astype(np.float32)
    lo = (hi * 2.0**-25 * rng.uniform(-1, 1, 10_000)).astype(np.float32)
    noisy, _ = update(dpmp.DoubleWord(jnp.asarray(hi), jnp.asarray(lo)), state)
    exact = hi.astype(np.float64) + lo + np.asarray(noise, np.float64)
    # Half a unit in the last place, and the rounding of error + lo.
    error = np.abs(noisy - exact)
    np.testing.assert_array_less(error, 0.5001 * np.spacing(np.abs(np.float32(exact))))


def test_the_noise_of_a_double_word_has_the_given_scale():
    privatizer = gaussian_privatizer(stddev=2.0, prng_key=KEY)
    total = dpmp.DoubleWord(jnp.zeros(NUM_DRAWS), jnp.zeros(NUM_DRAWS))
    noisy, _ = privatizer.update(total, privatizer.init(None))
    noise = np.asarray(noisy, np.float64)
    assert has_stddev(noise, 2.0)
    assert not has_stddev(noise, 2.1)


def test_stddev_zero_returns_the_sum_itself():
    privatizer = gaussian_privatizer(stddev=0.0, prng_key=KEY)
    x = jax.random.normal(KEY, (100,))
    total = {
        "float": x,
        "half": x.astype(jnp.bfloat16),
        "wide": dpmp.DoubleWord(x, x * jnp.float32(2.0**-30)),
    }
    noisy, _ = privatizer.update(total, privatizer.init(total))
    np.testing.assert_array_equal(noisy["float"], x)
    np.testing.assert_array_equal(noisy["half"], np.float32(total["half"]))
    np.testing.assert_array_equal(noisy["wide"], x)


def test_an_empty_tree_is_released_as_it_is():
    privatizer = gaussian_privatizer(stddev=1.0, prng_key=KEY)
    noisy, state = privatizer.update({}, privatizer.init({}))
    assert noisy == {}
    assert state.step == 1


def test_it_chains_with_optax_and_compiles():
    optimizer = optax.chain(
        gaussian_privatizer(stddev=2.0, prng_key=KEY), optax.sgd(0.5)
    )
    params = jnp.zeros(NUM_DRAWS)

    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(jnp.ones_like(params), state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    first, state = step(params, state)
    second, state = step(first, state)
    for update in (first - params, second - first):
        noise = np.asarray(update, np.float64) / -0.5 - 1
        assert has_stddev(noise, 2.0)
        assert not has_stddev(noise, 2.1)
    assert state[0].step == 2


def test_a_step_that_is_run_again_repeats_its_release():
    privatizer = gaussian_privatizer(stddev=0.3, prng_key=KEY)
    update = jax.jit(privatizer.update)
    total = jnp.linspace(-1, 1, 1000)
    first, state = update(total, privatizer.init(total))
    again, _ = update(total, NoiseState(KEY, jnp.zeros((), jnp.int32)))
    other, _ = update(total, state)
    np.testing.assert_array_equal(first, again)
    assert np.all(first != other)


def test_without_a_key_every_init_draws_128_bits():
    privatizer = gaussian_privatizer(stddev=1.0)
    states = [privatizer.init(jnp.zeros(1)) for _ in range(20)]
    words = np.array([jax.random.key_data(state.prng_key) for state in states])
    assert words.dtype == np.uint32
    assert words.shape == (20, 4)
    assert len(np.unique(words)) == words.size
    releases = [float(privatizer.update(jnp.zeros(()), s)[0]) for s in states]
    assert len(set(releases)) == len(states)


def test_without_a_key_init_is_refused_under_jit():
    privatizer = gaussian_privatizer(stddev=1.0)
    with pytest.raises(ValueError, match=r"must be drawn outside of jax\.jit"):
        jax.jit(privatizer.init)(jnp.zeros(3))
    with_key = gaussian_privatizer(stddev=1.0, prng_key=KEY)
    assert jax.jit(with_key.init)(jnp.zeros(3)).step == 0


@pytest.mark.parametrize("stddev", [-1.0, np.inf, np.nan, None, jnp.ones(())])
def test_a_stddev_that_is_no_finite_number_is_refused(stddev):
    with pytest.raises(ValueError, match="stddev must be a finite number of at least"):
        gaussian_privatizer(stddev=stddev, prng_key=KEY)


@pytest.mark.parametrize("seed", [0, np.uint32([0, 1]), jnp.zeros(2, jnp.uint32)])
def test_a_seed_that_is_no_key_is_refused(seed):
    with pytest.raises(ValueError, match=r"one key made by jax\.random\.key"):
        gaussian_privatizer(stddev=1.0, prng_key=seed)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, "int32"])
def test_noise_narrower_than_float32_is_refused(dtype):
    with pytest.raises(ValueError, match="noise must be float32 or float64"):
        gaussian_privatizer(stddev=1.0, prng_key=KEY, dtype=dtype)


def test_float64_noise_is_refused_where_jax_would_narrow_it():
    with pytest.raises(ValueError, match="float64 noise need 64-bit mode"):
        gaussian_privatizer(stddev=1.0, prng_key=KEY, dtype=jnp.float64)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64, jnp.bool_], ids=str)
def test_leaves_that_are_not_real_floats_are_refused(dtype):
    privatizer = gaussian_privatizer(stddev=1.0, prng_key=KEY)
    total = (jnp.zeros(3), jnp.zeros(3, dtype))
    with pytest.raises(ValueError, match="real float array; got leaf=1"):
        privatizer.update(total, privatizer.init(total))
