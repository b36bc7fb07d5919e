"""Scales change what float16 has room for, and nothing else."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference

import dpmp
from dpmp import loss_scaling
from dpmp.clipping import _joint_sums, clipped_grad
from dpmp.engines import _methods
from dpmp.mechanism import _released

_METHODS = ["per_example", "book_keeping"]


def _loss(params, batch):
    return jnp.mean(jnp.tanh(batch["x"] @ params["w"]) * batch["weight"])


_PARAMS = {"w": jax.random.normal(jax.random.key(0), (4, 3))}


def _make_batch(weight=1.0):
    x = jax.random.normal(jax.random.key(1), (6, 5, 4))
    weight = weight * jnp.arange(1.0, 7.0)[:, None, None]
    return {"x": x, "weight": jnp.broadcast_to(weight, (6, 5, 1))}


def _sum(loss_scale, dtype=jnp.float32, weight=1.0, **kwargs):
    fun = clipped_grad(
        _loss,
        **{
            "l2_clip_norm": 0.5 * weight,
            "return_values": True,
            "return_grad_norms": True,
            "loss_scale": loss_scale,
            **kwargs,
        },
    )
    cast = functools.partial(jax.tree.map, lambda x: x.astype(dtype))
    return jax.jit(fun.__call__)(cast(_PARAMS), cast(_make_batch(weight)))


def _assert_same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize(
    "loss_scale",
    [1.0, 2.0**-9, 2.0**20, loss_scaling.by_loss()],
    ids=["1", "small", "large", "by_loss"],
)
@pytest.mark.parametrize("arithmetic", [None, "exact"])
def test_a_scale_changes_no_bit_of_float32_gradients(loss_scale, arithmetic):
    expected = _sum(None, arithmetic=arithmetic)
    _assert_same(_sum(loss_scale, arithmetic=arithmetic), expected)


@pytest.mark.parametrize(
    "loss_scale", [2.0**-9, loss_scaling.by_loss()], ids=["static", "by_loss"]
)
@pytest.mark.parametrize("arithmetic", ["unproved_float32", "bounded"])
def test_a_scale_changes_nothing_that_is_kept_in_books(loss_scale, arithmetic):
    kwargs = {"arithmetic": arithmetic, "method": "book_keeping"}
    expected = _sum(None, **kwargs)
    _assert_same(_sum(loss_scale, **kwargs), expected)


@pytest.mark.parametrize("method", _METHODS)
@pytest.mark.parametrize(
    "loss_scale", [2.0**14, loss_scaling.by_loss()], ids=["static", "by_loss"]
)
def test_small_gradients_do_not_vanish_in_float16(method, loss_scale):
    weight = 2.0**-20
    kwargs = {"method": method, "arithmetic": reference.FLOAT_SUMS[method]}
    wide, _ = _sum(None, weight=weight, **kwargs)
    lost, _ = _sum(None, jnp.float16, weight, **kwargs)
    kept, sensitive = _sum(loss_scale, jnp.float16, weight, **kwargs)

    def distance(x):
        differences = jax.tree.map(lambda a, b: np.float64(a) - np.float64(b), x, wide)
        return reference.norm(differences) / reference.norm(wide)

    assert distance(lost) > 0.05
    assert distance(kept) < 0.01
    assert np.all(sensitive.grad_norms > 0)


@pytest.mark.parametrize("method", _METHODS)
@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_an_example_that_overflows_contributes_zero(method, microbatch_size):
    kwargs = {
        "method": method,
        "microbatch_size": microbatch_size,
        "arithmetic": reference.FLOAT_SUMS[method],
    }
    # Float16 ends at 2^16: the gradients of the last examples are beyond it.
    scale, weight = 2.0**15, 8.0
    total, sensitive = _sum(scale, jnp.float16, weight, **kwargs)
    is_kept = np.isfinite(sensitive.grad_norms)
    assert 0 < np.sum(is_kept) < 6
    params, batch = jax.tree.map(
        lambda x: x.astype(jnp.float16), (_PARAMS, _make_batch(weight))
    )
    fun = clipped_grad(_loss, l2_clip_norm=4.0, loss_scale=scale, **kwargs)
    expected = jax.jit(fun.__call__)(params, batch, is_padding_example=~is_kept)
    _assert_same(total, expected)


@pytest.mark.parametrize("method", _METHODS)
def test_contributions_have_at_most_the_clip_norm(method):
    for i in range(6):
        fun = clipped_grad(
            _loss,
            l2_clip_norm=0.01,
            loss_scale=loss_scaling.by_loss(),
            method=method,
            arithmetic=reference.FLOAT_SUMS[method],
        )
        total = jax.jit(fun.__call__)(
            _PARAMS, _make_batch(), is_padding_example=np.arange(6) != i
        )
        assert 0.0098 < reference.norm(total) <= 0.01


def test_aux_and_values_are_those_of_the_loss():
    def loss(params, batch):
        value = _loss(params, batch)
        return value, {"twice": 2 * value}

    fun = clipped_grad(
        loss, has_aux=True, l2_clip_norm=1.0, return_values=True, loss_scale=2.0**9
    )
    _, sensitive = fun(_PARAMS, _make_batch())
    batch = jax.tree.map(lambda x: x[:, None], _make_batch())
    values = jax.vmap(_loss, in_axes=(None, 0))(_PARAMS, batch)
    np.testing.assert_allclose(sensitive.values, values, rtol=1e-6)
    np.testing.assert_array_equal(sensitive.aux["twice"], 2 * sensitive.values)


def test_a_scale_may_be_an_array_of_a_compiled_step():
    def step(scale):
        return clipped_grad(_loss, l2_clip_norm=0.5, loss_scale=scale)(
            _PARAMS, _make_batch()
        )

    expected, _ = _sum(None)
    _assert_same(jax.jit(step)(jnp.float32(2.0**7)), expected)


@pytest.mark.parametrize("loss", [0.0, 1e-30, 0.3, 1.0, 1000.0, 3e38, -5.0])
def test_scales_by_loss_are_powers_of_two(loss):
    scale = float(loss_scaling.by_loss(64.0)(jnp.float32(loss)))
    assert math.frexp(scale)[0] == 0.5
    assert 2.0**-40 <= scale <= 2.0**15
    if 2.0**-9 < abs(loss) < 2.0**40:
        assert 32 < scale * abs(loss) <= 64


@pytest.mark.parametrize("loss", [math.nan, math.inf])
@pytest.mark.parametrize("method", _METHODS)
def test_losses_that_are_not_finite_are_selected_away(loss, method):
    batch = _make_batch()
    batch["weight"] = batch["weight"].at[2].set(loss)
    fun = clipped_grad(
        _loss, l2_clip_norm=0.5, loss_scale=loss_scaling.by_loss(), method=method
    )
    expected = fun(_PARAMS, _make_batch(), is_padding_example=np.arange(6) == 2)
    _assert_same(fun(_PARAMS, batch), expected)


_NO_SCALES = [-2.0, -0.0, math.nan, math.inf, -math.inf]
_WILD_SCALES = [
    *(2.0**k for k in (41, 64, 65, 67, 100, 127, -41, -100, -126)),
    *(3.0, 1e30, 1e-30, 1e-42, 0.0, *_NO_SCALES),
]


def _bilinear_loss(w, batch):
    return jnp.sum((batch["x"] @ w) * batch["g"])


@functools.cache
def _make_wild_sum(method, arithmetic, kind):
    """The sum as a function of scale, batch and padding: one program."""

    def total(scale, batch, is_padding):
        fun = clipped_grad(
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
        return np.asarray(total.steps, np.float64) * total.unit
    return reference.float64_values(total)


@pytest.mark.parametrize("kind", ["array", "function"])
@pytest.mark.parametrize(
    ("method", "arithmetic"),
    [
        *(("per_example", x) for x in ("float32", "exact")),
        *(("book_keeping", x) for x in ("unproved_float32", "bounded")),
    ],
)
def test_no_scale_makes_an_example_count_for_more(method, arithmetic, kind):
    """Nor does it change what other examples of the microbatch count for."""
    rng = np.random.default_rng(0)
    total = _make_wild_sum(method, arithmetic, kind)
    for sizes in ([0.1, 0.03, 1e-7, 1.0], [1e-12, 1.0, 1e-36, 0.0], [1e17, 1, 1, 1]):
        roots = np.sqrt(sizes)[:, None, None]
        batch = {
            "x": jnp.asarray(roots * rng.normal(size=(4, 2, 3)), jnp.float32),
            "g": jnp.asarray(roots * rng.normal(size=(4, 2, 2)), jnp.float32),
        }
        for scale in _WILD_SCALES:
            whole = _real_values(total(scale, batch, np.zeros(4, bool)))
            for i in range(4):
                without = _real_values(total(scale, batch, np.arange(4) == i))
                # Of a sum of four, each of at most the clip norm.
                rounding = 4 * 2.0**-24
                assert np.linalg.norm(whole - without) <= 0.01 * (1 + rounding)


@pytest.mark.parametrize("method", _METHODS)
@pytest.mark.parametrize("scale", _NO_SCALES)
def test_an_example_without_a_scale_contributes_zero(method, scale):
    def loss_scale(loss):
        return jnp.where(loss > 1.0, jnp.asarray(scale, loss.dtype), 1.0)

    fun = clipped_grad(
        lambda w, x: jnp.sum(w * x) ** 2,
        l2_clip_norm=1.0,
        loss_scale=loss_scale,
        return_grad_norms=True,
        method=method,
        arithmetic=reference.FLOAT_SUMS[method],
    )
    x = jnp.array([[0.5, 0.0], [3.0, 4.0], [0.0, 0.25]])
    w = jnp.ones(2)
    total, sensitive = jax.jit(fun.__call__)(w, x)
    expected, _ = jax.jit(fun.__call__)(w, x, is_padding_example=np.arange(3) == 1)
    _assert_same(total, expected)
    np.testing.assert_array_equal(np.isfinite(sensitive.grad_norms), [1, 0, 1])


def test_scales_are_rounded_down_to_powers_of_two_in_range():
    given = jnp.array([3.0, 2.0**41, 1e30, 1e-30, 1e-42, 0.0, 5.5, 2.0**-40], "float32")
    _, (_, _, scales) = jax.vmap(
        lambda scale: _methods.scaled(lambda x: (x, None), scale)(jnp.float32(1))
    )(given)
    expected = np.exp2([1.0, 40, 40, -40, -40, -40, 2, -40])
    np.testing.assert_array_equal(scales, expected)


@pytest.mark.parametrize("returned", [np.ones(3, np.float32), np.bool(1)])
def test_a_function_that_returns_no_number_is_refused(returned):
    fun = clipped_grad(_loss, l2_clip_norm=1.0, loss_scale=lambda _: returned)
    with pytest.raises(ValueError, match="must be one number"):
        fun(_PARAMS, _make_batch())


@pytest.mark.parametrize("scale", [0.0, -1.0, 3.0, 2.0**41, math.inf, math.nan, "2"])
def test_what_is_no_power_of_two_is_refused(scale):
    with pytest.raises(ValueError, match="power of two"):
        clipped_grad(_loss, l2_clip_norm=1.0, loss_scale=scale)


def test_one_array_for_all_examples_is_refused():
    with pytest.raises(ValueError, match="by_loss"):
        clipped_grad(_loss, l2_clip_norm=1.0, loss_scale=jnp.ones(6))


def test_transformations_of_scaled_gradients_are_refused():
    with pytest.raises(ValueError, match="pre_clipping_transform"):
        clipped_grad(
            _loss,
            l2_clip_norm=1.0,
            loss_scale=2.0,
            pre_clipping_transform=lambda grads: grads,
        )


def _make_trainer(**kwargs):
    mechanism = dpmp.DPSGD(
        num_examples=64,
        expected_batch_size=16,
        iterations=2,
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
    )
    return dpmp.DPTrainer(
        mechanism=mechanism,
        loss_fn=lambda w, x: jnp.mean((x @ w) ** 2) * 2.0**-14,
        optimizer=optax.sgd(1.0),
        policy=dpmp.Policy.from_name("mixed_float16"),
        prng_key=jax.random.key(0),
        **kwargs,
    )


def test_float16_without_a_scale_is_warned_of():
    with pytest.warns(UserWarning, match="loss_scale") as record:
        _make_trainer()
    assert record[0].filename == __file__


def test_a_trainer_scales_the_loss():
    trainer = _make_trainer(loss_scale=2.0**14)
    norms = []
    state = trainer.init(jnp.full(3, 0.01))
    data = np.full((64, 3), 0.01, np.float32)
    trainer.fit(
        state,
        data,
        sensitive_callback=lambda outputs: norms.append(
            outputs.grad_norms[~outputs.is_padding_example]
        ),
        progress=False,
    )
    assert np.all(np.concatenate(norms) > 0)


# Scales that follow a count of overflows.


def _spoiled_batch(*which):
    batch = _make_batch()
    for i in which:
        batch["weight"] = batch["weight"].at[i].set(jnp.inf)
    return batch


@pytest.mark.parametrize("method", _METHODS)
@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_gradients_that_are_not_finite_are_counted(method, microbatch_size):
    fun = clipped_grad(
        _loss,
        l2_clip_norm=0.5,
        normalize_by=4.0,
        counts_overflows=True,
        method=method,
        microbatch_size=microbatch_size,
    )
    batch, is_padding = _spoiled_batch(0, 3, 5), np.arange(6) == 3
    counted = fun(_PARAMS, batch, is_padding_example=is_padding)
    count = counted.num_overflows
    assert int(count.steps) == 2 * 32767
    assert 0.124999 < count.unit * 32767 <= 0.125 == fun.l2_norm_bound
    alone = clipped_grad(
        _loss,
        l2_clip_norm=0.5,
        normalize_by=4.0,
        method=method,
        microbatch_size=microbatch_size,
    )(_PARAMS, batch, is_padding_example=is_padding)
    _assert_same(counted.sum_of_clipped_grads, alone)


def test_an_example_counts_or_contributes_but_never_both():
    fun = clipped_grad(
        _loss, l2_clip_norm=0.01, arithmetic="exact", counts_overflows=True
    )
    for batch in (_make_batch(), _spoiled_batch(2)):
        counted = fun(_PARAMS, batch, is_padding_example=np.arange(6) != 2)
        steps = jax.tree.map(
            lambda x: np.int64(x.steps), counted, is_leaf=lambda x: hasattr(x, "steps")
        )
        assert sum(np.sum(x**2) for x in jax.tree.leaves(steps)) <= 32767**2


def test_counts_do_not_wrap_around():
    count = _joint_sums.count_overflows(jnp.full(2**17, jnp.inf), 1.0)
    assert int(count.steps) == (2**16 - 1) * 32767


def test_overflows_that_are_let_through_cannot_be_counted():
    with pytest.raises(ValueError, match="safe"):
        clipped_grad(_loss, l2_clip_norm=1.0, nan_safe=False, counts_overflows=True)


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


@pytest.mark.parametrize("kwargs", [{"initial": 3.0}, {"growth_interval": 0}])
def test_dynamic_scales_are_checked(kwargs):
    with pytest.raises(ValueError, match=r"power of two|at least 1"):
        loss_scaling.DynamicScale(**kwargs)
    with pytest.raises(ValueError, match="DPTrainer"):
        clipped_grad(_loss, l2_clip_norm=1.0, loss_scale=loss_scaling.DynamicScale())


@pytest.mark.parametrize("arithmetic", ["exact", "float32"])
def test_a_scale_follows_overflows_and_survives_a_break(arithmetic):
    mechanism = dpmp.DPSGD(
        num_examples=64,
        expected_batch_size=32,
        iterations=12,
        l2_clip_norm=1.0,
        noise_multiplier=0.5,
        arithmetic=arithmetic,
    )
    trainer = dpmp.DPTrainer(
        mechanism=mechanism,
        # A gradient of 64: above a scale of 2^9 it is more than float16 has room for.
        loss_fn=lambda w, x: jnp.sum(x * w) * 16,
        optimizer=optax.sgd(0.0),
        policy=dpmp.Policy.from_name("mixed_float16"),
        loss_scale=loss_scaling.DynamicScale(initial=2.0**14, growth_interval=10**6),
        prng_key=jax.random.key(0),
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

    def start():
        return trainer.init(jnp.ones(4))

    in_one = jax.tree.map(np.asarray, run(start(), 12).scale_state)
    assert scales[:5] == [2.0**13, 2.0**12, 2.0**11, 2.0**10, 2.0**9]
    assert set(scales[5:]) == {2.0**9}
    in_two = run(run(start(), 3), 12).scale_state
    _assert_same(in_two, in_one)
    assert scales[12:] == scales[:12]


def test_without_privacy_a_scale_follows_the_overflows_themselves():
    mechanism = dpmp.DPSGD(
        num_examples=8, expected_batch_size=8, iterations=3, l2_clip_norm=1.0
    ).without_privacy()
    trainer = dpmp.DPTrainer(
        mechanism=mechanism,
        loss_fn=lambda w, x: jnp.sum(x * w),
        optimizer=optax.sgd(0.0),
        policy=dpmp.Policy.from_name("mixed_float16"),
        loss_scale=loss_scaling.DynamicScale(initial=2.0**17),
    )
    state = trainer.init(jnp.ones(4))
    state = trainer.fit(state, np.ones((8, 4), np.float32), progress=False)
    assert state.scale_state.scale == 2.0**15


# An attacker who sees all that is released, and knows everything but whether one
# example, whose gradient overflows, is there. The ideal Gaussian mechanism allows an
# advantage of 0.383 at a noise multiplier of 1.

_TRIALS = 2000


def _released_with(is_there):
    """The scales after one step, and what is released with them, over many runs."""
    dynamic = loss_scaling.DynamicScale(tolerated=0.0)
    fun = clipped_grad(
        lambda w, x: jnp.sum(w * x),
        l2_clip_norm=1.0,
        arithmetic="exact",
        counts_overflows=True,
    )
    batch = jnp.array([[1.0, 0.0], [jnp.inf, 0.0]])
    counted = fun(
        jnp.zeros(2), batch, is_padding_example=jnp.array([False, not is_there])
    )

    @jax.jit
    def one_run(seed):
        privatizer = dpmp.noise_addition.gaussian_privatizer(
            stddev=1.0, prng_key=jax.random.key(seed)
        )
        noisy, _ = privatizer.update(counted, privatizer.init(counted))
        count = _released.in_examples(noisy.num_overflows, 1.0)
        return dynamic.update(dynamic.init(), count, stddev=1.0).scale, count

    seeds = np.arange(_TRIALS) + _TRIALS * is_there
    return [np.asarray(x) for x in zip(*map(one_run, seeds), strict=True)]


def _advantage(x, y):
    """Of the best threshold: the largest difference of distribution functions."""
    thresholds = np.concatenate([x, y])
    shares = [np.searchsorted(np.sort(z), thresholds) / len(z) for z in (x, y)]
    return np.max(np.abs(shares[0] - shares[1]))


def test_who_sees_scale_and_count_knows_no_more_than_the_gaussian_mechanism_allows():
    without, with_it = _released_with(False), _released_with(True)
    # Four standard errors of a difference of two shares.
    error = 4 * math.sqrt(0.5 / _TRIALS)
    assert 0.383 - error <= _advantage(without[1], with_it[1]) <= 0.383 + error
    assert _advantage(without[0], with_it[0]) <= 0.383 + error


def test_who_sees_the_scale_of_other_libraries_knows_for_certain():
    def naive_scale(is_there):
        grads = jnp.array([[1.0, 0.0], [jnp.inf if is_there else 0.0, 0.0]])
        # As in ordinary training: the scale halves when anything is not finite.
        return jnp.where(jnp.all(jnp.isfinite(jnp.sum(grads, 0))), 1.0, 0.5)

    seen = [np.full(_TRIALS, naive_scale(is_there)) for is_there in (False, True)]
    assert _advantage(*seen) == 1.0
