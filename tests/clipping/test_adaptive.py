"""An adaptive clip norm finds its quantile, within the sensitivity that is charged."""

import dataclasses
import functools
import math

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

import dpmp
from dpmp import AdaptiveClipNorm, ReleasedMetrics
from dpmp.clipping._joint_sums import JointSum

pytestmark = pytest.mark.bits

_MODES = [
    ("per_example", "exact"),
    ("book_keeping", "bounded"),
    ("book_keeping", "unproved_float32"),
]
_ADAPTIVE = AdaptiveClipNorm(initial=2.0, norm_share=0.5)
_COUNTING = ReleasedMetrics(fraction_overflowed=True)
_ALL = ReleasedMetrics(largest_loss=4.0, fraction_clipped=True, norm_share=0.5)
_BATCH = np.float32([[0.5, 0], [3.0, 0], [np.inf, 1.0], [2.0, 0], [-7.0, 0]])
_W = np.ones(2, np.float32)
_SIGNS = [1, -1, -1, 1, -1]


def _loss(w, x):
    return jnp.sum(w * x)


def _mechanism(**fields):
    return dpmp.DPSGD(
        **{
            "num_examples": 1000,
            "expected_batch_size": 100,
            "iterations": 20,
            "l2_clip_norm": _ADAPTIVE,
            "noise_multiplier": 1.0,
            "delta": 1e-5,
            **fields,
        }
    )


@functools.cache
def _joint_sum_fn(metrics, **kwargs):
    fun = dpmp.clipped_grad(
        _loss,
        l2_clip_norm=_ADAPTIVE,
        rescale_to_unit_norm=True,
        normalize_by=4.0,
        released_metrics=metrics or _COUNTING,
        **kwargs,
    )
    return fun, jax.jit(fun.__call__)


def _joint_sum(is_padding, metrics=None, **kwargs):
    fun, compiled = _joint_sum_fn(metrics, **kwargs)
    return fun, compiled(_W, _BATCH, is_padding_example=is_padding)


@pytest.mark.parametrize(
    ("method", "arithmetic", "metrics"),
    [(*mode, metrics) for mode, metrics in zip(_MODES, (None, _ALL, None), strict=True)]
    + [(*_MODES[0], _ALL)],
)
def test_one_example_moves_all_that_is_released_by_the_joint_norm_bound(
    method, arithmetic, metrics
):
    options = {"method": method, "arithmetic": arithmetic, "metrics": metrics}
    for which, sign in enumerate(_SIGNS):
        fun, joint = _joint_sum(np.arange(5) != which, **options)
        assert isinstance(joint, JointSum)
        assert reference.has_norm_at_most(joint, fun.l2_norm_bound)
        count = reference.exact_values(joint.within)[0] / (0.5 / 4.0)
        assert math.isclose(count, sign, rel_tol=1e-6)
    shares = [0.5] if metrics is None else [0.5, 0.5]
    assert math.isclose(fun.l2_norm_bound, math.hypot(1, *shares) / 4, rel_tol=1e-14)
    assert fun.l2_norm_bound >= math.hypot(1, *shares) / 4
    _, of_nobody = _joint_sum(np.ones(5, bool), **options)
    assert int(of_nobody.within.counts) == 0


@pytest.mark.parametrize(("rescale", "factor"), [(False, 4.0), (True, 1.0)])
def test_the_sum_is_in_clip_norms_and_the_released_gradient_is_not(rescale, factor):
    mechanism = _mechanism(noise_multiplier=0.0, rescale_to_unit_norm=rescale)

    @jax.jit
    def release(x, clip_norm):
        grad_fn = mechanism.clipped_grad(_loss, clip_norm=clip_norm)
        total = grad_fn(_W, x, is_padding_example=np.zeros(len(x), bool))
        privatizer = mechanism.privatizer(jax.random.key(0))
        noisy, _ = privatizer.update(total, privatizer.init(None))
        return mechanism.split(noisy, clip_norm=clip_norm)

    released = release(np.full((100, 2), 0.5, np.float32), np.float32(4.0))
    expected = np.full(2, 0.5 / 4.0 * factor)
    np.testing.assert_allclose(released.noisy_grads, expected, rtol=1e-3)
    # All are within: the clip norm falls as for a fraction of 1.
    expected = 4 * math.exp(-0.2 * (1 - 0.5))
    assert math.isclose(released.clip_norm, expected, rel_tol=1e-5)


@pytest.mark.parametrize(
    ("method", "arithmetic", "quantile"),
    [(*_MODES[0], 0.2), (*_MODES[2], 0.9)],
)
def test_it_finds_the_quantile(method, arithmetic, quantile):
    norms = np.random.default_rng(1).lognormal(1.0, 1.0, 400).astype(np.float32)
    adaptive = AdaptiveClipNorm(initial=0.1, quantile=quantile, learning_rate=0.5)
    mechanism = _mechanism(
        expected_batch_size=400,
        iterations=60,
        l2_clip_norm=adaptive,
        noise_multiplier=0.5,
        method=method,
        arithmetic=arithmetic,
        microbatch_size=8 if method == "book_keeping" else None,
    )
    assert adaptive.stddev(mechanism.stddev) < 0.01
    privatizer = mechanism.privatizer(jax.random.key(1))

    @jax.jit
    def step(clip_norm, noise_state):
        total = mechanism.clipped_grad(_loss, clip_norm=clip_norm)(
            jnp.ones(1), norms[:, None], is_padding_example=np.zeros(len(norms), bool)
        )
        noisy, noise_state = privatizer.update(total, noise_state)
        return mechanism.split(noisy, clip_norm=clip_norm).clip_norm, noise_state

    clip_norm, noise_state = mechanism.initial_clip_norm, privatizer.init(None)
    seen = []
    for _ in range(60):
        clip_norm, noise_state = step(clip_norm, noise_state)
        seen.append(float(clip_norm))
    fraction = np.mean(norms <= np.mean(seen[-20:]))
    assert abs(fraction - quantile) < 0.02
    assert len(set(seen[-5:])) == 5  # there is noise


def test_epsilon_is_that_of_two_gaussian_mechanisms_in_one():
    mechanism = _mechanism(noise_multiplier=0.8)
    # The noise that is added: on a gradient of norm 1, and on a count of +-1/2.
    of_gradient = mechanism.stddev * 100
    of_count = _ADAPTIVE.stddev(mechanism.stddev) * 100
    joint = (of_gradient**-2 + (2 * of_count) ** -2) ** -0.5
    assert math.isclose(joint, 0.8, rel_tol=1e-12)
    assert math.isclose(
        of_gradient, 0.8 * (1 + _ADAPTIVE.noise_increase), rel_tol=1e-12
    )
    accountant = dp_accounting.pld.PLDAccountant(
        dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    )
    step = dp_accounting.PoissonSampledDpEvent(
        0.1, dp_accounting.GaussianDpEvent(joint)
    )
    accountant.compose(dp_accounting.SelfComposedDpEvent(step, 20))
    epsilon = accountant.get_epsilon(1e-5)
    # The mechanism also pays for truncated batches and for the samplers.
    assert epsilon <= mechanism.guarantee().epsilon < 1.002 * epsilon
    fixed = dataclasses.replace(mechanism, l2_clip_norm=1.0)
    assert mechanism.guarantee() == fixed.guarantee()


def test_the_noise_on_the_fraction_has_the_standard_deviation_that_is_stated():
    mechanism = _mechanism(expected_batch_size=4, released_metrics=_ALL)
    clip_norm = np.float32(2.0)
    grad_fn = mechanism.clipped_grad(_loss, clip_norm=clip_norm)
    total = grad_fn(_W, _BATCH[:4], is_padding_example=np.zeros(4, bool))

    @jax.jit
    def release(seed):
        privatizer = mechanism.privatizer(jax.random.key(seed))
        noisy, _ = privatizer.update(total, privatizer.init(None))
        return mechanism.split(noisy, clip_norm=clip_norm).clip_norm

    norms = np.array([release(seed) for seed in range(600)])
    fractions = 0.5 - np.log(norms / 2.0) / 0.2
    stated = _ADAPTIVE.stddev(mechanism.stddev)
    assert math.isclose(stated, math.hypot(1, 0.5, 0.5) / (2 * 0.5) / 4, rel_tol=1e-9)
    # Four standard errors, and what a grid may be wider by.
    assert math.isclose(np.std(fractions), stated, rel_tol=0.15)
    assert abs(np.mean(fractions) - 0.5) < 5 * stated / math.sqrt(600)


def test_updates_stay_in_their_range():
    adaptive = AdaptiveClipNorm(initial=1.0, lowest=0.5, highest=2.0)
    fractions = np.float32([-1e30, -1e3, 0.5, 1e3, 1e30, 0.4])
    *wild, last = jax.jit(lambda x: adaptive.update(1.0, x))(fractions)
    np.testing.assert_array_equal(wild, [2, 2, 1, 0.5, 0.5])
    assert last.dtype == jnp.float32
    assert last > 1
