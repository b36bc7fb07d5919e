"""Scales change what float16 has room for, and nothing else."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from small_runs import new_trainer

import dpmp
from dpmp import loss_scaling
from dpmp.clipping import _joint_sums, clipped_grad
from dpmp.engines import _methods

_SCALES = {"static": 2.0**14, "by_loss": loss_scaling.by_loss()}


_COUNTING = dpmp.ReleasedMetrics(fraction_overflowed=True)


def _scaled_grad(loss_fn, *, loss_scale=None, **kwargs):
    if loss_scale is not None:
        loss_fn = loss_scaling.ScaledLoss(loss_fn, loss_scale)
    return clipped_grad(loss_fn, **kwargs)


def _loss(params, batch):
    return jnp.mean(jnp.tanh(batch["x"] @ params["w"]) * batch["weight"])


_rng = np.random.default_rng(0)
_PARAMS = {"w": _rng.normal(size=(4, 3)).astype(np.float32)}
_X = _rng.normal(size=(6, 5, 4)).astype(np.float32)


def _make_batch(weight=1.0):
    weight = np.float32(weight * np.arange(1, 7)[:, None, None])
    return {"x": _X, "weight": np.broadcast_to(weight, (6, 5, 1))}


def _sum_fn(**options):
    """A compiled sum: of float sums, unless told otherwise."""
    arithmetic = reference.FLOAT_SUMS[options.get("method", "per_example")]
    return _compiled(**dict(sorted({"arithmetic": arithmetic, **options}.items())))


@functools.cache
def _compiled(**options):
    fun = _scaled_grad(_loss, return_values=True, return_grad_norms=True, **options)
    return jax.jit(fun.__call__)


def _cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def _sum(loss_scale, dtype=np.float32, weight=1.0, **options):
    options = {"l2_clip_norm": 0.5 * weight, "loss_scale": loss_scale, **options}
    args = _cast((_PARAMS, _make_batch(weight)), dtype)
    return _sum_fn(**options)(*args)


def _assert_same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize(
    ("method", "arithmetic", "kind"),
    [("per_example", "float32", "array"), ("book_keeping", "bounded", "by_loss")],
)
def test_a_scale_changes_no_bit_of_float32_gradients(method, arithmetic, kind):
    """In one program: another may compute the loss in another way."""
    options = {"method": method, "arithmetic": arithmetic}

    @jax.jit
    def total(scale):
        def by_loss(loss):
            return jnp.where(scale == 1, 1.0, _SCALES["by_loss"](loss))

        fun = _scaled_grad(
            _loss,
            l2_clip_norm=0.5,
            loss_scale=scale if kind == "array" else by_loss,
            **options,
        )
        return fun(_PARAMS, _make_batch())

    unscaled, *scaled = (total(np.float32(x)) for x in (1.0, 2.0**20, 2.0**-9))
    for x in scaled:
        _assert_same(x, unscaled)
    if arithmetic == "float32":
        assert reference.relative_distance(unscaled, _sum(None, **options)[0]) < 1e-5


@pytest.mark.parametrize(
    ("method", "kind"), [("per_example", "static"), ("book_keeping", "by_loss")]
)
def test_small_gradients_do_not_vanish_in_float16(method, kind):
    weight = 2.0**-20
    wide, _ = _sum(None, weight=weight, method=method)
    lost, _ = _sum(None, np.float16, weight, method=method)
    kept, sensitive = _sum(_SCALES[kind], np.float16, weight, method=method)
    assert reference.relative_distance(lost, wide) > 0.05
    assert reference.relative_distance(kept, wide) < 0.01
    assert np.all(sensitive.grad_norms > 0)


@pytest.mark.parametrize(
    ("method", "microbatch_size"), [("per_example", 2), ("book_keeping", None)]
)
def test_an_example_that_overflows_contributes_zero(method, microbatch_size):
    options = {"method": method, "microbatch_size": microbatch_size}
    # Float16 ends at 2^16: the gradients of the last examples are beyond it.
    fun = _sum_fn(l2_clip_norm=4.0, loss_scale=2.0**15, **options)
    args = _cast((_PARAMS, _make_batch(8.0)), np.float16)
    total, sensitive = fun(*args, is_padding_example=np.zeros(6, bool))
    is_kept = np.isfinite(sensitive.grad_norms)
    assert 0 < np.sum(is_kept) < 6
    _assert_same(total, fun(*args, is_padding_example=~is_kept)[0])


def test_scales_by_loss_are_powers_of_two():
    losses = [0.0, 1e-30, 0.3, 1.0, 1000.0, 3e38, -5.0]
    scales = jax.jit(jax.vmap(loss_scaling.by_loss(64.0)))(np.float32(losses)).tolist()
    for loss, scale in zip(losses, scales, strict=True):
        assert math.frexp(scale)[0] == 0.5
        assert 2.0**-40 <= scale <= 2.0**15
        if 2.0**-9 < abs(loss) < 2.0**40:
            assert 32 < scale * abs(loss) <= 64


def _spoiled_batch(*which, value=math.inf):
    batch = _make_batch()
    is_spoiled = np.isin(np.arange(6), which)[:, None, None]
    return batch | {"weight": np.where(is_spoiled, np.float32(value), batch["weight"])}


_WILD_SCALES = [
    *(2.0**k for k in (41, 64, 65, 67, 100, 127, -41, -100, -126)),
    *(3.0, 1e30, 1e-30, 1e-42, 0.0, -2.0, math.nan, math.inf, -math.inf),
]


def _bilinear_loss(w, batch):
    return jnp.sum((batch["x"] @ w) * batch["g"])


@functools.cache
def _make_wild_sum(method, arithmetic, kind):
    """The sum as a function of scale, batch and padding: one program."""

    def total(scale, batch, is_padding):
        fun = _scaled_grad(
            _bilinear_loss,
            l2_clip_norm=0.01,
            loss_scale={"array": scale, "function": lambda _: scale}[kind],
            method=method,
            arithmetic=arithmetic,
            microbatch_size=2,
        )
        return fun(jnp.zeros((3, 2)), batch, is_padding_example=is_padding)

    return jax.jit(total)


def _real_values(total):
    if isinstance(total, dpmp.GridArray):
        return np.asarray(total.counts, np.float64) * total.unit
    return reference.float64_values(total)


@pytest.mark.parametrize(
    ("method", "arithmetic", "kind"),
    [
        ("per_example", "float32", "array"),
        ("per_example", "exact", "function"),
        ("book_keeping", "unproved_float32", "function"),
        ("book_keeping", "bounded", "array"),
    ],
)
def test_no_scale_makes_an_example_count_for_more(method, arithmetic, kind):
    """Nor does it change what other examples of the microbatch count for."""
    rng = np.random.default_rng(0)
    total = _make_wild_sum(method, arithmetic, kind)
    for sizes in ([0.1, 0.03, 1e-7, 1.0], [1e-12, 1.0, 1e-36, 0.0], [1e17, 1, 1, 1]):
        roots = np.sqrt(sizes)[:, None, None]
        batch = {
            "x": np.float32(roots * rng.normal(size=(4, 2, 3))),
            "g": np.float32(roots * rng.normal(size=(4, 2, 2))),
        }
        for scale in _WILD_SCALES:
            whole = _real_values(total(scale, batch, np.zeros(4, bool)))
            for i in range(4):
                without = _real_values(total(scale, batch, np.arange(4) == i))
                # Of a sum of four, each of at most the clip norm.
                rounding = 4 * 2.0**-24
                assert np.linalg.norm(whole - without) <= 0.01 * (1 + rounding)


def test_scales_are_rounded_down_to_powers_of_two_in_range():
    given = [3.0, 2.0**41, 1e30, 1e-30, 1e-42, 0.0, 5.5, 2.0**-40]
    no_scales = [-2.0, -0.0, math.nan, math.inf, -math.inf]
    scaled = jax.vmap(
        lambda scale: _methods.scaled(lambda x: (x, None), scale)(jnp.float32(1))
    )
    _, (_, _, scales) = jax.jit(scaled)(np.float32([*given, *no_scales]))
    expected = np.exp2([1.0, 40, 40, -40, -40, -40, 2, -40])
    np.testing.assert_array_equal(scales, [*expected, *5 * [math.nan]])


@pytest.mark.parametrize("returned", [np.ones(3, np.float32), np.bool(1)])
def test_a_function_that_returns_no_number_is_refused(returned):
    fun = _scaled_grad(_loss, l2_clip_norm=1.0, loss_scale=lambda _: returned)
    with pytest.raises(ValueError, match="must be one number"):
        fun(_PARAMS, _make_batch())


def _make_trainer(loss_fn, **fields):
    return new_trainer(
        loss_fn=loss_fn,
        optimizer=optax.sgd(0.0),
        policy="mixed_float16",
        prng_key=jax.random.key(0),
        **fields,
    )


# Scales that follow a count of overflows.


@pytest.mark.parametrize(
    ("method", "microbatch_size"), [("per_example", None), ("book_keeping", 2)]
)
def test_gradients_that_are_not_finite_are_counted(method, microbatch_size):
    options = {"method": method, "microbatch_size": microbatch_size}
    fun = functools.partial(
        clipped_grad, _loss, l2_clip_norm=0.5, normalize_by=4.0, **options
    )
    counting = fun(released_metrics=_COUNTING)
    args = _PARAMS, _spoiled_batch(0, 3, 5)
    is_padding = np.arange(6) == 3
    counted = counting(*args, is_padding_example=is_padding)
    count = counted.num_overflows
    assert int(count.counts) == 2 * 32767
    assert 0.124999 < count.unit * 32767 <= 0.125 == counting.l2_norm_bound
    alone = fun()(*args, is_padding_example=is_padding)
    _assert_same(counted.sum_of_clipped_grads, alone)


def test_counts_do_not_wrap_around():
    norms = np.full(2**17, np.inf, np.float32)
    count = jax.jit(lambda x: _joint_sums.count_overflows(x, 1.0))(norms)
    assert int(count.counts) == (2**16 - 1) * 32767


def _scales(dynamic, counts, stddev=0.0):
    state, scales = dynamic.init(), []
    for count in counts:
        state = dynamic.update(state, jnp.float32(count), stddev=stddev)
        scales.append(float(state.scale))
    return scales


def test_a_scale_grows_after_an_interval_and_halves_at_once():
    dynamic = loss_scaling.DynamicScale(initial=8.0, growth_interval=3, tolerated=0.0)
    assert _scales(dynamic, [0, 0, 0, 0, 5, 0, 0, 0]) == [8, 8, 16, 16, 8, 8, 8, 16]


def test_noise_alone_seldom_moves_a_scale():
    dynamic = loss_scaling.DynamicScale(initial=8.0, growth_interval=10**6)
    noise = np.random.default_rng(0).normal(scale=4.0, size=400)
    assert _scales(dynamic, noise, stddev=4.0)[-1] >= 8.0 / 4
    assert _scales(dynamic, noise + 30, stddev=4.0)[-1] == 2.0**-40


def test_a_scale_follows_overflows_and_survives_a_break():
    trainer = _make_trainer(
        # A gradient of 64: above a scale of 2^9 it is more than float16 has room for.
        lambda w, x: jnp.sum(x * w) * 16,
        expected_batch_size=32,
        iterations=12,
        noise_multiplier=0.5,
        method="per_example",
        loss_scale=loss_scaling.DynamicScale(initial=2.0**14, growth_interval=10**6),
    )
    data = np.full((64, 4), 4.0, np.float32)
    scales = []

    def run(state, stop_at):
        return trainer.fit(
            state,
            data,
            stop_at=stop_at,
            callback=lambda state: scales.append(float(state.scale_state.scale)),
            progress=False,
        )

    in_one = jax.tree.map(np.asarray, run(trainer.init(jnp.ones(4)), 12).scale_state)
    assert scales[:5] == [2.0**13, 2.0**12, 2.0**11, 2.0**10, 2.0**9]
    assert set(scales[5:]) == {2.0**9}
    in_two = run(run(trainer.init(jnp.ones(4)), 3), 12).scale_state
    _assert_same(in_two, in_one)
    assert scales[12:] == scales[:12]


def test_without_privacy_a_scale_follows_the_overflows_themselves():
    trainer = _make_trainer(
        lambda w, x: jnp.sum(x * w),
        num_examples=8,
        expected_batch_size=8,
        iterations=3,
        is_private=False,
        loss_scale=loss_scaling.DynamicScale(initial=2.0**17),
    )
    data = np.ones((8, 4), np.float32)
    state = trainer.fit(trainer.init(jnp.ones(4)), data, progress=False)
    assert state.scale_state.scale == 2.0**15


# An attacker who sees all that is released, and knows everything but whether one
# example, whose gradient overflows, is there. The ideal Gaussian mechanism allows an
# advantage of 0.383 at a noise multiplier of 1.

_TRIALS = 2000


def _released_with(*, is_there):
    """The scales after one step, and what is released with them, over many runs."""
    seeds = np.arange(_TRIALS) + _TRIALS * is_there
    is_padding = np.array([False, not is_there])
    return [np.asarray(x) for x in _run_all(is_padding, seeds)]


@jax.jit
def _run_all(is_padding, seeds):
    dynamic = loss_scaling.DynamicScale(tolerated=0.0)
    fun = _scaled_grad(
        lambda w, x: jnp.sum(w * x),
        l2_clip_norm=1.0,
        arithmetic="exact",
        released_metrics=_COUNTING,
    )
    batch = np.float32([[1.0, 0.0], [np.inf, 0.0]])
    counted = fun(jnp.zeros(2), batch, is_padding_example=is_padding)

    def one_run(seed):
        privatizer = dpmp.noise_addition.gaussian_privatizer(
            stddev=1.0, prng_key=jax.random.key(seed)
        )
        noisy, _ = privatizer.update(counted, privatizer.init(counted))
        count = noisy.num_overflows / _joint_sums.contribution(1.0)
        return dynamic.update(dynamic.init(), count, stddev=1.0).scale, count

    return jax.lax.map(one_run, seeds)


def _advantage(x, y):
    """Of the best threshold: the largest difference of distribution functions."""
    thresholds = np.concatenate([x, y])
    shares = [np.searchsorted(np.sort(z), thresholds) / len(z) for z in (x, y)]
    return np.max(np.abs(shares[0] - shares[1]))


def test_who_sees_scale_and_count_knows_no_more_than_the_gaussian_mechanism_allows():
    without, with_it = (_released_with(is_there=x) for x in (False, True))
    # Four standard errors of a difference of two shares.
    error = 4 * math.sqrt(0.5 / _TRIALS)
    assert 0.383 - error <= _advantage(without[1], with_it[1]) <= 0.383 + error
    assert _advantage(without[0], with_it[0]) <= 0.383 + error
