"""Programs of many arrays stay small: lines of StableHLO beyond the loss's own."""

import itertools

import jax
import jax.numpy as jnp
import pytest

import dpmp
from dpmp import _random, noise_addition
from dpmp.precision._stochastic_rounding import round_like

# What a shape takes that no other array has.
LINES_OF_A_SHAPE = {"exact": 320, "float32": 150}


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def num_lines(fun, *args):
    return jax.jit(lambda *xs: fun(*xs)).lower(*args).as_text().count("\n")


def lines_per_array(batch_size, widths, **kwargs):
    """Of a network of layers of these widths, beyond the plain gradient."""
    params = [shape(a, b) for a, b in itertools.pairwise(widths)]
    return lines_per_layer(jnp.matmul, params, shape(batch_size, widths[0]), kwargs)


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
    assert lines_per_array(batch_size, [64] * 21, arithmetic=arithmetic) <= 60


@pytest.mark.slow
@pytest.mark.parametrize("arithmetic", LINES_OF_A_SHAPE)
def test_arrays_of_different_shapes_take_few_lines(arithmetic):
    widths = range(60, 81)  # no two layers have the same shape
    lines = lines_per_array(32, widths, arithmetic=arithmetic)
    assert lines <= LINES_OF_A_SHAPE[arithmetic]


def clip_scalars(count):
    """The function that clips so many scalars, and its arguments."""
    clip = dpmp.clipped_grad(
        lambda p, x: jnp.mean(jnp.stack(p) * x), l2_clip_norm=1.0, arithmetic="exact"
    )
    return clip, [shape()] * count, shape(8, count)


def test_small_arrays_take_few_lines():
    assert num_lines(*clip_scalars(200)) <= 200 * 25


def test_small_arrays_take_few_lines_of_a_compiled_program():
    # If each were a function of its own, with the whole sum in it: 216.
    def num_compiled(count):
        clip, *args = clip_scalars(count)
        return jax.jit(clip.__call__).lower(*args).compile().as_text().count("\n")

    assert num_compiled(40) - num_compiled(20) <= 20 * 50


def test_clipping_groups_take_few_lines():
    params = [shape(64, 64)] * 20

    def loss(params, x):
        return sum(jnp.mean(x @ w) for w in params)

    def lines(l2_clip_norm):
        clip = dpmp.clipped_grad(loss, l2_clip_norm=l2_clip_norm, arithmetic="exact")
        return num_lines(clip, params, shape(32, 64))

    assert (lines([1.0] * 20) - lines(1.0)) / 20 <= 120


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
    total = [dpmp.GridArray(jnp.zeros(size, jnp.int32), 2.0**-15)] * 100
    privatizer = noise_addition.gaussian_privatizer(
        stddev=1.0, prng_key=jax.random.key(0)
    )
    state = privatizer.init(None)
    assert num_lines(lambda s: privatizer.update(total, s), state) <= 100 * 30


def test_keys_that_derive_from_each_other_are_derived_once():
    # Fused, a chain of three 128-bit keys would be computed 64 times.
    params = [jnp.ones(8, jnp.bfloat16)] * 2

    def round_all(key, step):
        key = _random.fold_in(key, step)
        return round_like([jnp.ones(8)] * 2, params, key)

    program = jax.jit(round_all).lower(_random.fresh_key(), 3).compile()
    assert program.as_text().count("\n") <= 5_000
