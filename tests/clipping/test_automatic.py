"""Automatic clipping divides by the norm, and never gives a contribution above 1."""

import functools
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

import dpmp
from dpmp import AutomaticClipping
from dpmp.clipping import _clip_norms
from dpmp.clipping._clip_norms import ClipNorms
from dpmp.numerics import SquaredNorm

_MODES = [
    ("per_example", "exact"),
    ("per_example", "float32"),
    ("book_keeping", "bounded"),
    ("book_keeping", "unproved_float32"),
]
_BOTH = pytest.mark.parametrize(("method", "arithmetic"), _MODES)


def _loss(w, x):
    """Its gradient is the example."""
    return jnp.sum(x[None] @ w[:, None])


@functools.cache
def _clipped(method, arithmetic, stability):
    fn = dpmp.clipped_grad(
        _loss,
        l2_clip_norm=AutomaticClipping(stability=stability),
        keep_batch_dim=False,
        method=method,
        arithmetic=arithmetic,
    )
    return jax.jit(fn.__call__)


def _contribution(example, method, arithmetic, stability=0.01):
    x = np.float32([example])
    total = _clipped(method, arithmetic, stability)(np.zeros(3, np.float32), x)
    return reference.exact_values(total).astype(float)


@hypothesis.given(
    norm=st.floats(2.0**-60, 2.0**60, width=32),
    stability=st.floats(1e-15, 1e15),
    normalize_by=st.floats(1e-3, 1e6),
    roundings=st.integers(0, 100),
)
def test_coefficients_cover_norms_and_roundings(
    norm, stability, normalize_by, roundings
):
    clipping = AutomaticClipping(stability=stability)
    clip_norms = ClipNorms.from_tree(clipping, False, normalize_by)
    squared = np.float32(np.float32(norm) ** 2)
    squared_norm = SquaredNorm(np.asarray([squared]), roundings, 0)
    (coefs,) = _clip_norms.coefficients(
        clip_norms.targets, [squared_norm], clip_norms.stability
    )
    u = Fraction(1, 2**24)
    largest = Fraction(float(squared)) / (1 - u) ** roundings
    room = Fraction(clip_norms.l2_norm_bound) / (1 + u)
    assert Fraction(float(coefs[0])) ** 2 * largest <= room**2


@pytest.mark.parametrize(
    ("method", "arithmetic", "stability"),
    [
        (*mode, stability)
        for mode, stability in zip(_MODES, (0.01, 1e-4, 1.0, 0.01), strict=True)
    ],
)
def test_a_contribution_is_the_gradient_over_its_norm_and_the_stability(
    method, arithmetic, stability
):
    for size in (1e-3, 0.1, 1.0, 1e4):
        gradient = np.array([1.0, -2.0, 2.0]) / 3 * size
        expected = gradient / (size + stability)
        actual = _contribution(gradient, method, arithmetic, stability)
        # What rounding to the grid takes, and the room of 1/64 of "bounded" sums.
        np.testing.assert_allclose(actual, expected, rtol=0.02, atol=1e-4)
        assert np.linalg.norm(actual) < 1


@_BOTH
def test_zero_and_what_is_not_finite_contribute_zero(method, arithmetic):
    for bad in ([0.0] * 3, [np.nan, 1, 1], [np.inf, 1, 1], [1e30, 1, 1]):
        assert not _contribution(bad, method, arithmetic).any()


def test_the_sensitivity_is_one_over_the_divisor():
    for options in ({}, {"rescale_to_unit_norm": True}):
        fn = dpmp.clipped_grad(
            _loss, l2_clip_norm=AutomaticClipping(), normalize_by=4.0, **options
        )
        assert fn.sensitivity() == 0.25
    mechanism = _mechanism()
    assert mechanism.stddev == 2.0 / 8
    clipped = _mechanism(l2_clip_norm=1.0)
    assert mechanism.guarantee() == clipped.guarantee()


def _mechanism(**fields):
    return dpmp.DPSGD(
        **{
            "num_examples": 64,
            "expected_batch_size": 8,
            "iterations": 3,
            "l2_clip_norm": AutomaticClipping(stability=0.125),
            "noise_multiplier": 2.0,
            "delta": 1e-5,
            **fields,
        }
    )


def test_outputs_of_functions_and_trees_are_clipped_too():
    outputs = np.float32([[3.0, 4.0], [0.0, 0.0], [np.nan, 1.0]])
    clipping = AutomaticClipping(stability=1.0)
    total = dpmp.clipped_fun(lambda x: x[0], l2_clip_norm=clipping)(outputs)
    np.testing.assert_allclose(total, [0.5, 4 / 6], rtol=0.01)  # the slack of float32
    clip = jax.jit(lambda x: dpmp.clip_pytree(x, clipping))
    clipped, norm = clip({"w": outputs[0]})
    np.testing.assert_allclose(clipped["w"], [0.5, 4 / 6], rtol=1e-5)
    assert norm == 5


def test_without_privacy_nothing_is_divided():
    mechanism = _mechanism().without_privacy()
    assert mechanism.l2_clip_norm == np.inf
    assert not mechanism.is_private


def test_the_statement_says_how_gradients_are_clipped():
    statement = " ".join(_mechanism().statement().split())
    assert "divided by its L2 norm plus 0.125 (automatic clipping)" in statement
    assert "norm is below 1. The sum" in statement
