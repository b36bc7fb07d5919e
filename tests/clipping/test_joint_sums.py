"""Released metrics are what they say, up to noise, and within the sensitivity."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference

import dpmp
from dpmp import ReleasedMetrics
from dpmp.clipping import clipped_grad
from dpmp.clipping._joint_sums import JointSum

pytestmark = pytest.mark.bits

_ALL = ReleasedMetrics(
    largest_loss=4.0, fraction_clipped=True, fraction_overflowed=True, norm_share=0.5
)
_BATCH = np.float32([[0.5, 0], [3.0, 0], [100.0, 1.0], [np.inf, 0], [-7.0, 0]])
_W = np.ones(2, np.float32)
_IS_PADDING = np.array([False, False, False, False, True])


def _loss(w, x):
    return jnp.sum(w * x)


@functools.cache
def _joint_sum_fn(metrics, **kwargs):
    options = {"l2_clip_norm": 2.0, "normalize_by": 4.0, "arithmetic": "exact"}
    fun = clipped_grad(_loss, **{**options, **kwargs}, released_metrics=metrics)
    return fun, jax.jit(fun.__call__)


def _joint_sum(metrics, is_padding=_IS_PADDING, **kwargs):
    fun, compiled = _joint_sum_fn(metrics, **kwargs)
    return fun, compiled(_W, _BATCH, is_padding_example=is_padding)


def _dpsgd(**kwargs):
    return dpmp.DPSGD(
        **{
            "num_examples": 64,
            "expected_batch_size": 4,
            "iterations": 3,
            "l2_clip_norm": 2.0,
            "noise_multiplier": 0.0,
            "released_metrics": _ALL,
            **kwargs,
        }
    )


@pytest.mark.parametrize(
    ("arithmetic", "microbatch_size"), [("exact", None), ("float32", 1)]
)
def test_without_noise_metrics_are_means_over_the_expected_batch(
    arithmetic, microbatch_size
):
    _, joint = _joint_sum(_ALL, arithmetic=arithmetic, microbatch_size=microbatch_size)
    assert isinstance(joint, JointSum)
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


@pytest.mark.parametrize(
    "metrics",
    [
        _ALL,
        ReleasedMetrics(fraction_clipped=True),
        ReleasedMetrics(largest_loss=1e-9),
        ReleasedMetrics(fraction_overflowed=True),
    ],
    ids=["all", "clipped", "loss", "overflowed"],
)
def test_one_example_moves_all_that_is_released_by_the_joint_norm_bound(metrics):
    for which in range(4):
        fun, joint = _joint_sum(metrics, np.arange(5) != which)
        assert reference.has_norm_at_most(joint, fun.l2_norm_bound)
        if which == 2 and metrics is _ALL:  # the largest contribution there is
            assert reference.norm(joint) >= 0.999 * fun.l2_norm_bound
    alone = clipped_grad(_loss, l2_clip_norm=2.0, normalize_by=4.0)
    widened = (1 + metrics.noise_increase) * alone.l2_norm_bound
    assert math.isclose(fun.l2_norm_bound, widened, rel_tol=2.0**-48)
    assert fun.sensitivity() == fun.l2_norm_bound


def test_the_noise_is_wider_by_what_metrics_cost_and_the_accounting_the_same():
    without = _dpsgd(released_metrics=None, noise_multiplier=1.0, delta=1e-5)
    for metrics, noise_increase in (
        (_ALL, math.hypot(1, 0.5)),
        (ReleasedMetrics(largest_loss=2.0), math.hypot(1, 0.1)),
        (ReleasedMetrics(fraction_overflowed=True), 1.0),
    ):
        with_metrics = _dpsgd(
            released_metrics=metrics, noise_multiplier=1.0, delta=1e-5
        )
        assert math.isclose(with_metrics.stddev, noise_increase * without.stddev)
        assert with_metrics.stddev >= noise_increase * without.stddev * (1 - 1e-15)
        assert math.isclose(metrics.noise_increase, noise_increase - 1, abs_tol=1e-12)
        assert with_metrics.guarantee() == without.guarantee()


def test_the_noise_of_metrics_has_the_standard_deviation_that_is_stated():
    mechanism = _dpsgd(noise_multiplier=2.0)
    joint = mechanism.clipped_grad(_loss)(_W, _BATCH, is_padding_example=_IS_PADDING)

    def release(seed):
        privatizer = mechanism.privatizer(jax.random.key(seed))
        noisy, _ = privatizer.update(joint, privatizer.init(joint))
        return mechanism.split(noisy).metrics

    draws = jax.jit(lambda seeds: jax.lax.map(release, seeds))(np.arange(600))
    for name in _ALL.names:
        # Four standard errors, and what a grid may be wider by.
        stated = _ALL.stddev(name, 2.0, 4)
        assert math.isclose(np.std(draws[name]), stated, rel_tol=0.12), name


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


@pytest.mark.parametrize(
    ("method", "arithmetic"),
    [
        ("per_example", "exact"),
        ("per_example", "float32"),
        ("book_keeping", "bounded"),
        ("book_keeping", "unproved_float32"),
    ],
)
def test_an_overflow_moves_the_count_and_no_gradient(method, arithmetic):
    # What one example adds is (clipped gradient, 0) or (0, C), never both, even if one
    # clipping group of it is finite. So the count is free.
    fun = clipped_grad(
        _two_layers,
        l2_clip_norm={"a": 1.0, "b": 5.0},
        released_metrics=ReleasedMetrics(fraction_overflowed=True),
        method=method,
        arithmetic=arithmetic,
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


def test_a_run_shows_its_metrics_with_noise(capsys):
    mechanism = _dpsgd(expected_batch_size=32, noise_multiplier=0.5, microbatch_size=8)
    trainer = dpmp.DPTrainer(
        mechanism=mechanism,
        loss_fn=lambda w, x: jnp.mean((x @ w - 1.0) ** 2),
        optimizer=optax.sgd(0.0),
        policy=dpmp.Policy.from_name("float32"),
        prng_key=jax.random.key(0),
    )
    state = trainer.init(np.zeros(3, np.float32))
    assert all(np.isnan(x) for x in state.metrics.values())
    seen = []
    state = trainer.fit(
        state,
        np.ones((64, 3), np.float32),
        callback=lambda state: seen.append(jax.device_get(state.metrics)),
    )
    assert len(seen) == 3
    assert set(state.metrics) == {"loss", "clipped", "overflowed"}
    for metrics in seen:
        for name, value in {"loss": 1.0, "clipped": 1.0, "overflowed": 0.0}.items():
            spread = 5 * _ALL.stddev(name, 0.5, 32) + 5 * math.sqrt(1 / 64)
            assert abs(metrics[name] - value) < spread, name
            assert metrics[name] != value
    assert f"noisy loss {float(state.metrics['loss']):.3g}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("l2_clip_norm", "metrics", "lines"),
    [
        (1.0, _ALL, ["Released at every step", "loss (standard", "11.80% wider"]),
        (dpmp.AdaptiveClipNorm(initial=2.0), None, ["begins at 2", "0.50% wider"]),
        (dpmp.AutomaticClipping(stability=0.125), None, ["plus 0.125 (automatic"]),
    ],
)
def test_the_statement_names_what_is_released(l2_clip_norm, metrics, lines):
    fields = {"l2_clip_norm": l2_clip_norm, "released_metrics": metrics}
    mechanism = _dpsgd(noise_multiplier=1.0, delta=1e-5, **fields)
    statement = " ".join(mechanism.statement().split())
    assert all(line in statement for line in lines)


def test_nothing_is_released_unless_asked_for():
    fun = functools.partial(clipped_grad, _loss, l2_clip_norm=1.0)
    total = jax.eval_shape(fun().__call__, _W, _BATCH)
    assert isinstance(total, jax.ShapeDtypeStruct)
    assert _dpsgd(released_metrics=None).metric_names == ()
