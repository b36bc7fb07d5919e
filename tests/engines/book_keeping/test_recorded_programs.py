"""What programs may do with parameters besides training models: all of it is right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import FLOAT_SUMS, assert_trees_close

from dpmp import clipped_grad
from dpmp.numerics._grid import LARGEST_RESOLUTION

RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.normal(size=8), jnp.float32)
X = jnp.asarray(RNG.normal(size=(4, 8)), jnp.float32)


def _scan_over_nothing(p, x):
    state, _ = jax.lax.scan(lambda c, w: (c @ w, None), x, p["none"])
    return jnp.sum(state * p["w"])


PROGRAMS = {
    "complex-convert": (
        lambda w, x: jnp.sum(jnp.real(w.astype(jnp.complex64) * jnp.exp(1j * x[0]))),
        W,
    ),
    "complex-product": (lambda w, x: jnp.abs(jnp.exp(1j * x[0]) @ (w + 0j)), W),
    "fourier": (
        lambda w, x: jnp.sum(jnp.fft.irfft(jnp.fft.rfft(w) * jnp.fft.rfft(x[0])) ** 2),
        W,
    ),
    "mask": (lambda w, x: jnp.sum(jnp.where(w > 0, x[0] * w, 0.0)), W),
    "index": (lambda w, x: x[0][jnp.argmax(w)] * jnp.sum(w * w) * x[0, 0], W),
    "no-entries": (
        lambda p, x: jnp.sum(p["w"] * x[0]) + jnp.sum(p["none"]) * x[0, 0],
        {"w": W, "none": jnp.zeros((0, 3))},
    ),
    "no-iterations": (_scan_over_nothing, {"w": W, "none": jnp.zeros((0, 8, 8))}),
    "parameters-alone": (lambda w, x: jnp.sum(w**2), W),
    "unused": (lambda p, x: jnp.sum(x[0]) * p["w"][0], {"w": W, "unused": W}),
}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_are_those_of_jax(program):
    loss, params = PROGRAMS[program]
    with jax.numpy_dtype_promotion("standard"):
        theirs, ours = (
            jax.jit(
                clipped_grad(
                    loss,
                    l2_clip_norm=1e9,
                    method=method,
                    arithmetic=FLOAT_SUMS[method],
                ).__call__
            )(params, X)
            for method in ("per_example", "book_keeping")
        )
    # Sums of 8 entries and 4 examples, in orders of their own.
    assert_trees_close(ours, theirs, rtol=16 * float(jnp.finfo(jnp.float32).eps))


def test_columns_of_bfloat16_are_taken():
    """XLA's CPU compiler had no code for the products of transposed cotangents."""
    params = jnp.asarray(RNG.normal(size=(6, 5)), jnp.bfloat16)
    batch = {
        "ids": jnp.asarray(RNG.integers(0, 5, size=(4, 3)), jnp.int32),
        "g": jnp.asarray(RNG.normal(size=(4, 6, 3)), jnp.bfloat16),
    }

    def loss(p, b):
        return jnp.sum((p[:, b["ids"][0]] * b["g"][0]).astype(jnp.float32))

    theirs, ours = (
        jax.jit(
            clipped_grad(
                loss, l2_clip_norm=1e9, method=method, arithmetic=FLOAT_SUMS[method]
            ).__call__
        )(params, batch)
        for method in ("per_example", "book_keeping")
    )
    assert_trees_close(ours, theirs, rtol=float(jnp.finfo(jnp.bfloat16).eps))


def test_integers_that_meet_parameters_do_not_wrap_around():
    with jax.enable_x64():
        batch = {
            "x": jnp.full((1, 3, 4), 2**32, jnp.int64),
            "g": jnp.full((1, 3, 4), 4.0, jnp.float32),
        }

        def loss(w, b):
            numbers = (((1,), (0,)), ((), ()))
            product = jax.lax.dot_general(
                b["x"][0], w, numbers, preferred_element_type=jnp.float32
            )
            return jnp.sum(product * b["g"][0])

        fn = clipped_grad(
            loss, l2_clip_norm=1.0, method="book_keeping", arithmetic="bounded"
        )
        total = jax.jit(fn.__call__)(jnp.zeros((4, 4), jnp.float32), batch)
    norm = np.linalg.norm(np.asarray(total.counts, np.float64)) / LARGEST_RESOLUTION
    assert 0.9 < norm <= 1


def test_cancelling_examples_are_kept():
    """The computed square of their norm may be less than zero."""
    x = np.ones((200, 16, 3), np.float32)
    signs = np.resize([1.0, -1.0], 16)[:, None]
    g = signs * (1 + 1e-7 * RNG.normal(size=(200, 16, 3)))
    batch = {"x": jnp.asarray(x), "g": jnp.asarray(g, jnp.float32)}
    fn = clipped_grad(
        lambda w, b: jnp.sum(b["g"] * (b["x"] @ w)),
        l2_clip_norm=1.0,
        method="book_keeping",
        arithmetic="unproved_float32",
        return_grad_norms=True,
    )
    _, sensitive = jax.jit(fn.__call__)(jnp.zeros((3, 3)), batch)
    assert np.all(np.asarray(sensitive.grad_norms) >= 0)
