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

_rng = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def same_numbers_in_any_order(monkeypatch):
    monkeypatch.setitem(globals(), "_rng", np.random.default_rng(1))


def _clip_fn(loss, *, clip_norm=1.0, **options):
    """The sum as a function of parameters and a batch, compiled for its shapes."""
    method = options.pop("method", "book_keeping")
    fun = dpmp.clipped_grad(
        lambda params, batch: loss(params, *batch),
        l2_clip_norm=clip_norm,
        method=method,
        arithmetic=options.pop("arithmetic", FLOAT_SUMS[method]),
        keep_batch_dim=False,
        **options,
    )
    compiled = jax.jit(fun.__call__)
    return lambda params, *batch: jax.tree.map(np.float64, compiled(params, batch))


def _relu(w, dtype):
    return jax.nn.relu(w.astype(dtype))


def _solved(w):
    matrix = jnp.diag(jnp.float32([1, 3, 10, 30])) + 0.3
    solution, _ = jax.scipy.sparse.linalg.cg(lambda v: matrix @ v, w, maxiter=2)
    return solution


# Of parameters alone, and not linear, or rounded, on the way back; by dtype of data.
_OF_PARAMETERS = {
    jnp.bfloat16: {
        "custom_jvp": lambda w: _relu(w, jnp.bfloat16),
        "checkpoint": jax.checkpoint(lambda w: w.astype(jnp.bfloat16) * 3),
        "map": lambda w: jax.lax.map(lambda w: w.astype(jnp.bfloat16), w),
        "set": lambda w: w.astype(jnp.bfloat16).at[0].set(0),
    },
    jnp.float16: {"custom_jvp": lambda w: _relu(w, jnp.float16)},
    jnp.float32: {
        "reduce_precision": lambda w: jax.lax.reduce_precision(w, 8, 7),
        "custom_linear_solve": _solved,
    },
}


@pytest.mark.parametrize("dtype", _OF_PARAMETERS)
def test_sums_follow_the_per_example_gradients(dtype):
    x = np.where(np.arange(2100)[:, None] < 2051, _rng.uniform(40, 60, (2100, 4)), 0)
    x, functions = np.float32(x).astype(dtype), _OF_PARAMETERS[dtype]

    def loss(params, x):
        values = [jnp.sum(functions[k](w) * x) for k, w in params.items()]
        return sum(value.astype(jnp.float32) for value in values)

    params = dict.fromkeys(functions, np.float32([1, 2, 3, 4]))
    ours, theirs = (
        _clip_fn(loss, clip_norm=100.0, method=method)(params, x)
        for method in ("book_keeping", "per_example")
    )
    # Not to one unit of bfloat16 of the sum, which is several clip norms; in float16
    # it would overflow.
    for name in functions:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-3)


def _two_uses(w, x, y):
    return jnp.sum(w * x) - jnp.sum(w * y)


def test_uses_that_cancel_do_not_move_what_others_contribute():
    x = np.asarray(0.1 * _rng.normal(size=(64, 50)), "f")
    x[7] = 0
    total = _clip_fn(_two_uses)
    w, y = np.ones(50, "f"), np.zeros_like(x)
    without = total(w, x, y)
    for size in (1e5, 1e9):
        x[7] = y[7] = size * _rng.normal(size=50)
        assert np.linalg.norm(total(w, x, y) - without) < 0.01


def _convolution(w, cotangent):
    image = jnp.full((1, 9, 9, 64), 1.828125, w.dtype)
    result = jax.lax.conv_general_dilated(
        image, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.sum(result.astype(jnp.float32) * cotangent)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_positions_that_cancel_do_not_move_what_others_contribute(dtype):
    """In a table and in a convolution, with materialized and scattered gradients."""
    w = np.ones((40, 64), jnp.dtype(dtype))
    ids = np.full((3, 30), 3)
    cotangents = (0.05 * _rng.normal(size=(3, 30, 64))).astype(np.float32)
    cotangents[1] = 0

    def lookup(w, ids, cotangent):
        return jnp.sum(w[ids].astype(jnp.float32) * cotangent)

    total = _clip_fn(lookup)
    without = total(w, ids, cotangents)
    cotangents[1, 0], cotangents[1, 1] = 1e9, -1e9
    assert np.linalg.norm(total(w, ids, cotangents) - without) < 0.1

    w = np.ones((3, 3, 64, 64), jnp.dtype(dtype))
    cotangents = (0.001 * _rng.normal(size=(3, 9, 9, 64))).astype(np.float32)
    cotangents[1] = 0
    total = _clip_fn(_convolution)
    without = total(w, cotangents[..., None, :, :, :])
    cotangents[1, 4, 2], cotangents[1, 4, 3:6] = 912e6, -304e6
    moved = total(w, cotangents[..., None, :, :, :]) - without
    assert np.linalg.norm(moved) < (0.1 if dtype == "float32" else 1.01)


def test_factors_that_are_rounded_leave_an_example_near_its_clip_norm():
    def loss(w, x, cotangent):
        return jnp.sum((x @ w).astype(jnp.float32) * cotangent)

    total, w = _clip_fn(loss), np.ones((64, 8), jnp.bfloat16)
    extreme = np.zeros((1, 4, 8))
    extreme[0, 0], extreme[0, 1:] = 912, -304
    cases = [(np.full((1, 4, 64), 1.828125), extreme)]
    for seed in range(2):
        rng = np.random.default_rng(seed)
        x = np.repeat(rng.normal(size=(1, 1, 64)), 4, axis=1)
        cotangent = rng.normal(size=(1, 4, 8))
        cases.append((x, 100 * (cotangent - cotangent.mean(1, keepdims=True))))
    for left, right in cases:
        args = left.astype(jnp.bfloat16), np.float32(right)
        assert np.linalg.norm(total(w, *args)) <= 1.01
