"""Released metrics and adaptive clip norms are what they say, and what they cost."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

import dpmp
from dpmp import AdaptiveClipNorm, ReleasedMetrics
from dpmp.clipping import clipped_grad
from dpmp.clipping._joint_sums import JointSum

pytestmark = pytest.mark.bits

_ALL = ReleasedMetrics(
    largest_loss=4.0, fraction_clipped=True, fraction_overflowed=True, norm_share=0.5
)
_COUNTING = ReleasedMetrics(fraction_overflowed=True)
_ADAPTIVE = AdaptiveClipNorm(initial=2.0, norm_share=0.5)
_ADAPTS = {"l2_clip_norm": _ADAPTIVE, "rescale_to_unit_norm": True}
_BATCH = np.float32([[0.5, 0], [3, 0], [100, 1], [np.inf, 0], [2, 0], [-7, 0]])
_SIGNS = [1, -1, -1, -1, 1, -1]  # of the examples within a clip norm of 2
_W = np.ones(2, np.float32)
_IS_PADDING = np.arange(6) >= 4

_MODES = [
    {"arithmetic": "exact"},
    {"arithmetic": "float32"},
    {"method": "book_keeping", "arithmetic": "bounded"},
    {"method": "book_keeping", "arithmetic": "unproved_float32"},
]


def _loss(w, x):
    return jnp.sum(w * x)


@functools.cache
def _joint_sum_fn(metrics, **options):
    options = {"l2_clip_norm": 2.0, "normalize_by": 4.0} | options
    fun = clipped_grad(_loss, **options, released_metrics=metrics)
    return fun, jax.jit(fun.__call__)


def _joint_sum(metrics, is_padding=_IS_PADDING, **options):
    fun, compiled = _joint_sum_fn(metrics, **options)
    return fun, compiled(_W, _BATCH, is_padding_example=is_padding)


def _dpsgd(**fields):
    return dpmp.DPSGD(
        **{
            "num_examples": 64,
            "expected_batch_size": 4,
            "iterations": 3,
            "l2_clip_norm": 2.0,
            "noise_multiplier": 0.0,
            "released_metrics": _ALL,
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("arithmetic", "microbatch_size"), [("exact", None), ("float32", 1)]
)
def test_without_noise_metrics_are_means_over_the_expected_batch(
    arithmetic, microbatch_size
):
    _, joint = _joint_sum(_ALL, arithmetic=arithmetic, microbatch_size=microbatch_size)
    privatizer = dpmp.noise_addition.gaussian_privatizer(
        stddev=0.0, prng_key=jax.random.key(0)
    )
    noisy, _ = privatizer.update(joint, privatizer.init(joint))
    metrics = _dpsgd(arithmetic=arithmetic).split(noisy).metrics
    # Losses of 0.5 and 3, of 101 and infinity: two are cut off at 4.
    expected = {"loss": (0.5 + 3 + 4 + 4) / 4, "clipped": 2 / 4, "overflowed": 1 / 4}
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert math.isclose(metrics[name], value, abs_tol=4 / 1023), name


# The share of each coordinate that is not free.
@pytest.mark.parametrize(
    ("metrics", "options", "shares"),
    [
        (_ALL, _MODES[0], [0.5]),
        (ReleasedMetrics(fraction_clipped=True), _MODES[0], [0.1]),
        (ReleasedMetrics(largest_loss=1e-9), _MODES[0], [0.1]),
        (_COUNTING, _MODES[0], []),
        (_ALL, _ADAPTS | _MODES[0], [0.5, 0.5]),
        (_ALL, _ADAPTS | _MODES[2], [0.5, 0.5]),
        (_COUNTING, _ADAPTS | _MODES[3], [0.5]),
    ],
)
def test_one_example_moves_all_that_is_released_by_the_joint_norm_bound(
    metrics, options, shares
):
    adapts = "l2_clip_norm" in options
    for which, sign in enumerate(_SIGNS):
        fun, joint = _joint_sum(metrics, np.arange(6) != which, **options)
        assert isinstance(joint, JointSum)
        assert reference.has_norm_at_most(joint, fun.l2_norm_bound)
        if which == 2 and metrics is _ALL:  # the largest contribution there is
            assert reference.norm(joint) >= 0.97 * fun.l2_norm_bound
        if adapts:
            count = reference.exact_values(joint.within)[0] / (0.5 / 4.0)
            assert math.isclose(count, sign, rel_tol=1e-6)
    expected = math.hypot(1, *shares) * (1 if adapts else 2) / 4
    assert math.isclose(fun.l2_norm_bound, expected, rel_tol=2.0**-48)
    assert fun.sensitivity() == fun.l2_norm_bound >= expected
    _, of_nobody = _joint_sum(metrics, np.ones(6, bool), **options)
    assert not reference.exact_squared_norm(of_nobody)


def test_the_noise_is_wider_by_what_is_released_and_the_accounting_the_same():
    options = {"noise_multiplier": 1.0, "delta": 1e-5, "l2_clip_norm": 1.0}
    without = _dpsgd(**options, released_metrics=None)
    for fields, noise_increase in (
        ({"released_metrics": _ALL}, math.hypot(1, 0.5)),
        ({"released_metrics": ReleasedMetrics(largest_loss=2.0)}, math.hypot(1, 0.1)),
        ({"released_metrics": _COUNTING}, 1.0),
        ({"l2_clip_norm": _ADAPTIVE, "released_metrics": None}, math.hypot(1, 0.5)),
    ):
        (released,) = (x for x in fields.values() if x is not None)
        assert math.isclose(released.noise_increase, noise_increase - 1, abs_tol=1e-12)
        mechanism = _dpsgd(**options | fields)
        assert math.isclose(mechanism.stddev, noise_increase * without.stddev)
        assert mechanism.stddev >= noise_increase * without.stddev * (1 - 1e-15)
        assert mechanism.guarantee() == without.guarantee()


def _draws(mechanism, **clip_norm):
    """What 600 steps release on a batch of four examples."""
    grad_fn = mechanism.clipped_grad(_loss, **clip_norm)
    joint = grad_fn(_W, _BATCH, is_padding_example=_IS_PADDING)

    def release(seed):
        privatizer = mechanism.privatizer(jax.random.key(seed))
        noisy, _ = privatizer.update(joint, privatizer.init(joint))
        return mechanism.split(noisy, **clip_norm)

    return jax.jit(lambda seeds: jax.lax.map(release, seeds))(np.arange(600))


def test_noise_has_the_standard_deviation_that_is_stated():
    # Four standard errors, and what a grid may be wider by.
    released = _draws(_dpsgd(noise_multiplier=2.0))
    for name in _ALL.names:
        stated = _ALL.stddev(name, 2.0, 4)
        assert math.isclose(np.std(released.metrics[name]), stated, rel_tol=0.12), name
    mechanism = _dpsgd(l2_clip_norm=_ADAPTIVE, noise_multiplier=1.0)
    norms = _draws(mechanism, clip_norm=np.float32(2.0)).clip_norm
    fractions = 0.5 - np.log(np.asarray(norms) / 2.0) / 0.2
    stated = _ADAPTIVE.stddev(mechanism.stddev)
    assert math.isclose(stated, math.hypot(1, 0.5, 0.5) / (2 * 0.5) / 4, rel_tol=1e-9)
    assert math.isclose(np.std(fractions), stated, rel_tol=0.15)
    assert abs(np.mean(fractions) - 0.25) < 5 * stated / math.sqrt(600)


def _two_layers(w, x):
    return jnp.sum(w["a"] * x[..., 0] + w["b"] * x[..., 1])


_LAYERS = {"a": np.ones((), np.float32), "b": np.ones((), np.float32)}


def test_per_layer_clip_norms_count_an_example_that_any_of_them_clips():
    fun = clipped_grad(
        _two_layers,
        l2_clip_norm={"a": 1.0, "b": 5.0},
        released_metrics=ReleasedMetrics(fraction_clipped=True),
    )
    joint = fun(_LAYERS, np.float32([[0.5, 0.5], [2.0, 0.5], [0.5, 2.0], [2.0, 9.0]]))
    assert int(joint.metrics["clipped"].counts) == 2 * 1023


@pytest.mark.parametrize("options", _MODES, ids=lambda options: options["arithmetic"])
def test_an_overflow_moves_the_count_and_no_gradient(options):
    # What one example adds is (clipped gradient, 0) or (0, C), never both, even if one
    # clipping group of it is finite. So the count is free.
    fun = clipped_grad(
        _two_layers,
        l2_clip_norm={"a": 1.0, "b": 5.0},
        released_metrics=_COUNTING,
        **options,
    )
    batch = np.float32([[100.0, 100.0], [np.inf, 0.5], [2.0, np.nan], [0.1, -0.1]])
    bound = fun.l2_norm_bound
    assert bound == clipped_grad(_loss, l2_clip_norm=math.hypot(1, 5)).l2_norm_bound
    for which in range(4):
        joint = fun(_LAYERS, batch, is_padding_example=np.arange(4) != which)
        assert reference.has_norm_at_most(joint, bound)
        gradient = reference.norm(joint.sum_of_clipped_grads)
        count = reference.norm(joint.num_overflows)
        assert (gradient == 0) == (count > 0) == (which in (1, 2))
        assert count == 0 or math.isclose(count, bound, rel_tol=1e-6)


@pytest.mark.parametrize(
    ("l2_clip_norm", "metrics", "lines"),
    [
        (1.0, _ALL, ["Released at every step", "loss (standard", "11.80% wider"]),
        (AdaptiveClipNorm(initial=2.0), None, ["begins at 2", "0.50% wider"]),
        (dpmp.AutomaticClipping(stability=0.125), None, ["plus 0.125 (automatic"]),
    ],
)
def test_the_statement_names_what_is_released(l2_clip_norm, metrics, lines):
    fields = {"l2_clip_norm": l2_clip_norm, "released_metrics": metrics}
    mechanism = _dpsgd(noise_multiplier=1.0, delta=1e-5, **fields)
    statement = " ".join(mechanism.statement().split())
    assert all(line in statement for line in lines)


# How a clip norm adapts.


@pytest.mark.parametrize(("rescale", "factor"), [(False, 4.0), (True, 1.0)])
def test_the_sum_is_in_clip_norms_and_the_released_gradient_is_not(rescale, factor):
    mechanism = _dpsgd(
        l2_clip_norm=_ADAPTIVE, rescale_to_unit_norm=rescale, released_metrics=None
    )
    x, clip_norm = np.full((4, 2), 0.5, np.float32), np.float32(4.0)
    grad_fn = mechanism.clipped_grad(_loss, clip_norm=clip_norm)
    total = grad_fn(_W, x, is_padding_example=np.zeros(4, bool))
    privatizer = mechanism.privatizer(jax.random.key(0))
    noisy, _ = privatizer.update(total, privatizer.init(None))
    released = mechanism.split(noisy, clip_norm=clip_norm)
    expected = np.full(2, 0.5 / 4.0 * factor)
    np.testing.assert_allclose(released.noisy_grads, expected, rtol=1e-3)
    # All are within: the clip norm falls as for a fraction of 1.
    expected = 4 * math.exp(-0.2 * (1 - 0.5))
    assert math.isclose(released.clip_norm, expected, rel_tol=1e-5)


def test_updates_go_towards_the_quantile_and_stay_in_their_range():
    adaptive = AdaptiveClipNorm(initial=1.0, quantile=0.2, lowest=0.5, highest=2.0)
    fractions = np.float32([-1e30, -1e3, 0.2, 1e3, 1e30, 0.1, 0.3])
    *wild, above, below = jax.jit(lambda x: adaptive.update(1.0, x))(fractions)
    np.testing.assert_array_equal(wild, [2, 2, 1, 0.5, 0.5])
    assert above.dtype == jnp.float32
    np.testing.assert_allclose([above, below], np.exp([0.02, -0.02]), rtol=1e-6)
