"""Convolutions are what they were, and have a fast layout in loops and branches."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpmp
from dpmp.programs.interpreter import rewrite
from dpmp.programs.transformations import FAST_CONVOLUTIONS

# The layouts of the input and the kernel, their shapes, and options.
_CONVOLUTIONS = {
    "channels first": ("NCHW", "OIHW", (2, 4, 5, 6), (3, 4, 3, 2), {}),
    "strides": (
        "NCHW",
        "OIHW",
        (2, 4, 5, 6),
        (3, 4, 3, 2),
        {"window_strides": (2, 1), "padding": ((1, 0), (0, 2))},
    ),
    "transposed": (
        "CHWN",
        "IHWO",
        (4, 5, 6, 2),
        (4, 3, 2, 3),
        {"lhs_dilation": (2, 1), "padding": ((1, 0), (1, 1))},
    ),
    "groups": ("HNWC", "HIWO", (5, 2, 6, 8), (9, 4, 9, 6), {"feature_group_count": 2}),
    "one axis": ("NCW", "OIW", (2, 4, 5), (3, 4, 3), {"window_strides": (1,)}),
    "no axis": ("CN", "OI", (4, 2), (3, 4), {"window_strides": (), "padding": ()}),
    "no outputs": ("NCHW", "OIHW", (2, 4, 5, 6), (0, 4, 3, 2), {}),
}


def _make(name, dtype):
    inputs, kernel, shape, window, options = _CONVOLUTIONS[name]
    options = {"window_strides": (1, 1), "padding": "SAME"} | options
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-3, 4, size).astype(dtype) for size in (shape, window))

    def fun(x, w):
        numbers = (inputs, kernel, inputs)
        return jax.lax.conv_general_dilated(x, w, dimension_numbers=numbers, **options)

    return fun, jnp.asarray(x), jnp.asarray(w)


def _layouts(fun, *args):
    """The layouts of all convolutions in a program for a CPU."""
    text = jax.jit(fun).lower(*args).as_text()
    return set(re.findall(r"convolution\(.*dim_numbers = ([^ ]+,.*?\]), window", text))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", _CONVOLUTIONS)
def test_convolutions_and_their_gradients_are_what_they_were(name, dtype):
    fun, x, w = _make(name, dtype)

    def both(x, w):
        y, vjp = jax.vjp(fun, x, w)
        return y, vjp(y)

    pairs = zip(
        jax.tree.leaves(jax.jit(both)(x, w)),
        jax.tree.leaves(jax.jit(rewrite(both, FAST_CONVOLUTIONS))(x, w)),
        strict=True,
    )
    for expected, actual in pairs:  # small integers: hardly anything is rounded
        assert actual.dtype == expected.dtype
        rtol = 2.0**-7 if dtype == "bfloat16" else 1e-6
        np.testing.assert_allclose(
            np.float32(actual), np.float32(expected), rtol=rtol, strict=True
        )


_FAST = {"[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"}


def test_small_products_in_groups_stay_what_they_are():
    x, w = jnp.ones((2, 4, 5, 6)), jnp.ones((4, 1, 3, 3))

    def fun(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", feature_group_count=4)

    assert _layouts(rewrite(fun, FAST_CONVOLUTIONS), x, w) == _layouts(fun, x, w)


@pytest.mark.parametrize(
    ("method", "arithmetic"), [("per_example", "exact"), ("book_keeping", "bounded")]
)
def test_gradients_are_taken_in_the_fast_layout(method, arithmetic):
    fun, _, _ = _make("channels first", "float32")
    x, w = jnp.ones((2, 4, 9, 9)), jnp.ones((3, 4, 3, 3))

    def loss(params, x):
        return jnp.mean(fun(jnp.tanh(fun(x, params[0])), params[1]) ** 2)

    grad_fn = dpmp.clipped_grad(
        loss, l2_clip_norm=1.0, method=method, arithmetic=arithmetic
    )
    params = [w, w[:, :3]]
    assert len(_layouts(jax.grad(loss), params, x)) > 1
    assert _layouts(grad_fn.__call__, params, x) == _FAST
