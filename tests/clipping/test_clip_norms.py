import math
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

pytestmark = pytest.mark.bits


def _clip_norms_of(tree, rescale_to_unit_norm=False, normalize_by=1.0):
    return ClipNorms.from_tree(tree, rescale_to_unit_norm, normalize_by)


def _coefficient(clip_norms, squared_norm, roundings=0, slack=0.0):
    norm = SquaredNorm(jnp.asarray([squared_norm], jnp.float32), roundings, 0)
    targets = [(bound / (1 + slack), cap) for bound, cap in clip_norms.targets]
    (coef,) = _clip_norms.coefficients(targets, [norm], clip_norms.stability)
    assert coef.dtype == jnp.float32
    return float(coef[0])


@pytest.mark.parametrize("rescale", [False, True])
@hypothesis.given(
    clip_norm=st.floats(1e-3, 1e3),
    stability=st.none() | st.floats(1e-15, 1e15),
    norm=st.floats(2.0**-20, 2.0**20, width=32),
    normalize_by=st.floats(1e-3, 1e6),
    slack=st.floats(0, 0.05),
    roundings=st.integers(0, 100),
)
def test_coefficients_cover_norms_slack_and_roundings(
    rescale, clip_norm, stability, norm, normalize_by, slack, roundings
):
    if stability is not None:
        clip_norm = AutomaticClipping(stability=stability)
    clip_norms = _clip_norms_of(clip_norm, rescale, normalize_by)
    squared = np.float32(np.float32(norm) ** 2)
    coef = Fraction(_coefficient(clip_norms, squared, roundings, slack))
    # The largest true squared norm that `roundings` roundings can bring to `squared`.
    u = Fraction(1, 2**24)
    largest = Fraction(float(squared)) / (1 - u) ** roundings
    room = Fraction(clip_norms.l2_norm_bound) / ((1 + Fraction(slack)) * (1 + u))
    assert coef**2 * largest <= room**2


def test_the_bound_is_the_norm_of_all_clip_norms():
    assert _clip_norms_of({"a": 3.0, "b": 4.0}).l2_norm_bound == 5.0
    assert _clip_norms_of({"a": 3.0, "b": 4.0}, normalize_by=2.0).l2_norm_bound == 2.5
    assert _clip_norms_of({"a": 3.0, "b": 4.0}, True, 4.0).l2_norm_bound == 0.25
    for rescale in (False, True):
        assert _clip_norms_of(AutomaticClipping(), rescale, 4.0).l2_norm_bound == 0.25


@pytest.mark.parametrize(
    ("tree", "expected"), [([3.0, 4.0], [0.6, 0.8]), ([0.0, 0.0], [0.5**0.5] * 2)]
)
def test_rescaled_groups_share_a_norm_of_one(tree, expected):
    clip_norms = _clip_norms_of(tree, rescale_to_unit_norm=True)
    norms = [SquaredNorm(jnp.full(1, 100.0), 0, 0)] * 2
    coefs = _clip_norms.coefficients(clip_norms.targets, norms)
    coefs = [float(c[0]) * 10 for c in coefs]
    # Within 16 units of float32: 8 spare roundings are taken off.
    np.testing.assert_allclose(coefs, expected, rtol=16 * 2.0**-24)
    assert math.hypot(*coefs) <= 1.0


@hypothesis.given(st.floats(allow_nan=False))
def test_rounding_down_never_rounds_up(x):
    rounded = _clip_norms._round_down(x)
    assert float(rounded) <= x
    with np.errstate(over="ignore"):
        assert float(np.nextafter(rounded, np.float32(np.inf))) > x or rounded == x


# Automatic clipping.


def _loss(w, x):
    """Its gradient is the example."""
    return jnp.sum(x[None] @ w[:, None])


@pytest.mark.parametrize(
    ("method", "arithmetic", "stability"),
    [
        ("per_example", "exact", 0.01),
        ("per_example", "float32", 1e-4),
        ("book_keeping", "bounded", 1.0),
        ("book_keeping", "unproved_float32", 0.01),
    ],
)
def test_a_contribution_is_the_gradient_over_its_norm_and_the_stability(
    method, arithmetic, stability
):
    fun = dpmp.clipped_grad(
        _loss,
        l2_clip_norm=AutomaticClipping(stability=stability),
        keep_batch_dim=False,
        method=method,
        arithmetic=arithmetic,
    )
    assert fun.sensitivity() == 1.0
    compiled = jax.jit(fun.__call__)

    def contribution(example):
        total = compiled(np.zeros(3, np.float32), np.float32([example]))
        return reference.exact_values(total).astype(float)

    for size in (1e-3, 0.1, 1.0, 1e4):
        gradient = np.array([1.0, -2.0, 2.0]) / 3 * size
        actual = contribution(gradient)
        # What rounding to the grid takes, and the room of 1/64 of "bounded" sums.
        expected = gradient / (size + stability)
        np.testing.assert_allclose(actual, expected, rtol=0.02, atol=1e-4)
        assert np.linalg.norm(actual) < 1
    for bad in ([0.0] * 3, [np.nan, 1, 1], [np.inf, 1, 1], [1e30, 1, 1]):
        assert not contribution(bad).any()


def test_outputs_of_functions_and_trees_are_clipped_too():
    outputs = np.float32([[3.0, 4.0], [0.0, 0.0], [np.nan, 1.0]])
    clipping = AutomaticClipping(stability=1.0)
    total = dpmp.clipped_fun(lambda x: x[0], l2_clip_norm=clipping)(outputs)
    np.testing.assert_allclose(total, [0.5, 4 / 6], rtol=0.01)  # the slack of float32
    clip = jax.jit(lambda x: dpmp.clip_pytree(x, clipping))
    clipped, norm = clip({"w": outputs[0]})
    np.testing.assert_allclose(clipped["w"], [0.5, 4 / 6], rtol=1e-5)
    assert norm == 5


# What is refused, beyond tests/test_bad_inputs.py.


def test_a_clip_norm_without_an_array_is_refused():
    with pytest.raises(ValueError, match="must clip at least one array"):
        _clip_norms_of({"a": 1.0, "b": 1.0}).check_prefix_of({"a": 0.0, "b": ()})
