"""Losses made up so that norms and sums might not be of the same gradient.

One example of a batch is exchanged, and the sum may change by no more than two clip
norms; or alone, it may have no more than one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import FLOAT_SUMS

import dpmp
from dpmp.loss_scaling import ScaledLoss

_rng = np.random.default_rng(0)


def _clip(loss, params, *batch, clip_norm=1.0, **options):
    method = options.pop("method", "book_keeping")
    fun = dpmp.clipped_grad(
        lambda params, batch: loss(params, *batch),
        l2_clip_norm=clip_norm,
        method=method,
        arithmetic=options.pop("arithmetic", FLOAT_SUMS[method]),
        keep_batch_dim=False,
        **options,
    )
    return np.asarray(jax.jit(fun.__call__)(params, batch), np.float64)


def _relu(w, dtype):
    return jax.nn.relu(w.astype(dtype))


def _solved(w, x):
    matrix = jnp.diag(jnp.float32([1, 3, 10, 30])) + 0.3
    solution, _ = jax.scipy.sparse.linalg.cg(lambda v: matrix @ v, w, maxiter=2)
    return solution @ x


# Of parameters alone, and not linear, or rounded, on the way back.
_OF_PARAMETERS = {
    "custom_jvp": lambda w, x: jnp.sum(_relu(w, jnp.bfloat16) * x),
    "custom_jvp-float16": lambda w, x: jnp.sum(_relu(w, jnp.float16) * x),
    "checkpoint": lambda w, x: jnp.sum(
        jax.checkpoint(lambda w: w.astype(jnp.bfloat16) * 3)(w) * x
    ),
    "map": lambda w, x: jnp.sum(jax.lax.map(lambda w: w.astype(jnp.bfloat16), w) * x),
    "set": lambda w, x: jnp.sum(w.astype(jnp.bfloat16).at[0].set(0) * x),
    "reduce_precision": lambda w, x: jnp.sum(jax.lax.reduce_precision(w, 8, 7) * x),
    "custom_linear_solve": _solved,
}


@pytest.mark.parametrize("name", _OF_PARAMETERS)
def test_sums_follow_the_per_example_gradients(name):
    x = np.where(np.arange(2100)[:, None] < 2051, _rng.uniform(40, 60, (2100, 4)), 0)
    dtype = jnp.float16 if name.endswith("float16") else jnp.bfloat16
    x = jnp.asarray(x, jnp.float32 if name.startswith(("red", "custom_l")) else dtype)

    def loss(w, x):
        return _OF_PARAMETERS[name](w, x).astype(jnp.float32)

    w = jnp.float32([1, 2, 3, 4])
    ours, theirs = (
        _clip(loss, w, x, clip_norm=100.0, method=method)
        for method in ("book_keeping", "per_example")
    )
    # Not to one unit of bfloat16 of the sum, which is several clip norms; in float16
    # it would overflow.
    np.testing.assert_allclose(ours, theirs, rtol=1e-3)


def _two_uses(w, x, y):
    return jnp.sum(w * x) - jnp.sum(w * y)


@pytest.mark.parametrize("size", [1e5, 1e9])
def test_uses_that_cancel_do_not_move_what_others_contribute(size):
    x = np.asarray(0.1 * _rng.normal(size=(64, 50)), "f")
    x[7] = 0
    y = np.zeros_like(x)
    without = _clip(_two_uses, jnp.ones(50), x, y)
    x[7] = y[7] = size * _rng.normal(size=50)
    assert np.linalg.norm(_clip(_two_uses, jnp.ones(50), x, y) - without) < 0.01


def _convolution(w, cotangent):
    image = jnp.full((1, 9, 9, 64), 1.828125, w.dtype)
    result = jax.lax.conv_general_dilated(
        image, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.sum(result.astype(jnp.float32) * cotangent)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_positions_that_cancel_do_not_move_what_others_contribute(dtype):
    """In a table and in a convolution, with materialized and scattered gradients."""
    w = jnp.ones((40, 64), dtype)
    ids = np.full((3, 30), 3)
    cotangents = (0.05 * _rng.normal(size=(3, 30, 64))).astype(np.float32)
    cotangents[1] = 0

    def lookup(w, ids, cotangent):
        return jnp.sum(w[ids].astype(jnp.float32) * cotangent)

    without = _clip(lookup, w, ids, cotangents)
    cotangents[1, 0], cotangents[1, 1] = 1e9, -1e9
    assert np.linalg.norm(_clip(lookup, w, ids, cotangents) - without) < 0.1

    w = jnp.ones((3, 3, 64, 64), dtype)
    cotangents = (0.001 * _rng.normal(size=(3, 9, 9, 64))).astype(np.float32)
    cotangents[1] = 0
    without = _clip(_convolution, w, cotangents[..., None, :, :, :])
    cotangents[1, 4, 2], cotangents[1, 4, 3:6] = 912e6, -304e6
    moved = _clip(_convolution, w, cotangents[..., None, :, :, :]) - without
    assert np.linalg.norm(moved) < (0.1 if dtype == "float32" else 1.01)


@pytest.mark.parametrize("seed", range(2))
def test_factors_that_are_rounded_leave_an_example_near_its_clip_norm(seed):
    rng = np.random.default_rng(seed)
    x = np.repeat(rng.normal(size=(1, 1, 64)), 4, axis=1)
    cotangent = rng.normal(size=(1, 4, 8))
    cotangent -= cotangent.mean(1, keepdims=True)
    extreme = np.zeros((1, 4, 8))
    extreme[0, 0], extreme[0, 1:] = 912, -304

    def loss(w, x, cotangent):
        return jnp.sum((x @ w).astype(jnp.float32) * cotangent)

    w = jnp.ones((64, 8), jnp.bfloat16)
    for left, right in (
        (x, 100 * cotangent),
        (np.full((1, 4, 64), 1.828125), extreme),
    ):
        args = jnp.asarray(left, jnp.bfloat16), jnp.asarray(right, jnp.float32)
        assert np.linalg.norm(_clip(loss, w, *args)) <= 1.01


@pytest.mark.parametrize("method", ["per_example", "book_keeping"])
def test_a_tiny_loss_scale_does_not_hide_a_norm(method):
    total = _clip(
        ScaledLoss(lambda w, x: jnp.sum(w * x), 2.0**-40),
        jnp.ones(3),
        jnp.full((1, 3), 2.0**-25, jnp.float32),
        clip_norm=1e-10,
        method=method,
    )
    assert np.linalg.norm(total) <= 1e-10
