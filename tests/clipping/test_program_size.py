"""Programs of many arrays stay small: lines of StableHLO beyond the loss's own."""

import jax
import jax.numpy as jnp
import pytest

import dpmp
from dpmp import _random, noise_addition
from dpmp.precision._stochastic_rounding import round_like


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def num_lines(fun, *args):
    return jax.jit(lambda *xs: fun(*xs)).lower(*args).as_text().count("\n")


def lines_per_layer(layer, params, batch, kwargs):
    def loss(params, x):
        for w in params:
            x = jnp.tanh(layer(x, w))
        return jnp.mean(jnp.square(x))

    clip = dpmp.clipped_grad(loss, l2_clip_norm=1.0, **kwargs)
    plain = num_lines(jax.grad(loss), params, batch)
    return (num_lines(clip, params, batch) - plain) / len(params)


@pytest.mark.parametrize(
    ("arithmetic", "batch_size"), [("exact", 512), ("float32", 32)]
)
def test_arrays_of_one_shape_take_few_lines(arithmetic, batch_size):
    params, batch = [shape(64, 64)] * 20, shape(batch_size, 64)
    kwargs = {"arithmetic": arithmetic}
    assert lines_per_layer(jnp.matmul, params, batch, kwargs) <= 60


def test_small_arrays_take_few_lines():
    clip = dpmp.clipped_grad(
        lambda p, x: jnp.mean(jnp.stack(p) * x), l2_clip_norm=1.0, arithmetic="exact"
    )
    assert num_lines(clip, [shape()] * 100, shape(8, 100)) <= 100 * 25


def test_clipping_groups_take_few_lines():
    params = [shape(64, 64)] * 8

    def loss(params, x):
        return sum(jnp.mean(x @ w) for w in params)

    def lines(l2_clip_norm):
        clip = dpmp.clipped_grad(loss, l2_clip_norm=l2_clip_norm, arithmetic="exact")
        return num_lines(clip, params, shape(32, 64))

    assert (lines([1.0] * 8) - lines(1.0)) / 8 <= 120


def convolution(x, w):
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@pytest.mark.parametrize(
    ("layer", "weights", "batch", "dtype", "limit"),
    [
        (jnp.matmul, (64, 64), (32, 8, 64), jnp.bfloat16, 60),
        (convolution, (3, 3, 16, 16), (32, 8, 8, 16), jnp.float32, 160),
    ],
    ids=["bfloat16", "convolution"],
)
def test_book_keeping_takes_few_lines(layer, weights, batch, dtype, limit):
    params, batch = [shape(*weights, dtype=dtype)] * 20, shape(*batch, dtype=dtype)
    kwargs = {"method": "book_keeping", "arithmetic": "bounded"}
    assert lines_per_layer(layer, params, batch, kwargs) <= limit


@pytest.mark.parametrize("size", [100, 20_000])
def test_noise_for_many_arrays_takes_few_lines(size):
    total = [dpmp.GridArray(jnp.zeros(size, jnp.int32), 2.0**-15)] * 40
    privatizer = noise_addition.gaussian_privatizer(
        stddev=1.0, prng_key=jax.random.key(0)
    )
    state = privatizer.init(None)
    assert num_lines(lambda s: privatizer.update(total, s), state) <= 40 * 30


def test_keys_that_derive_from_each_other_are_derived_once():
    # Fused, a chain of three 128-bit keys would be computed 64 times.
    params = [jnp.ones(8, jnp.bfloat16)] * 2

    def round_all(key, step):
        key = _random.fold_in(key, step)
        return round_like([jnp.ones(8)] * 2, params, key)

    program = jax.jit(round_all).lower(_random.fresh_key(), 3).compile()
    assert program.as_text().count("\n") <= 5_000
