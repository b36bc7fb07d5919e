import functools
import itertools
import math

import dp_accounting
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import models
import numpy as np
import pytest
import reference
from programs import equations

from dpmp import clipping
from dpmp.clipping import clip_pytree, clipped_fun, clipped_grad
from dpmp.numerics import UNIT_ROUNDOFF

pytestmark = pytest.mark.bits

_RELATIONS = dp_accounting.NeighboringRelation

# What clipping may cost: 8 spare roundings and half of those on the longest path of
# the squared norm, once as slack and once as error. Below 60 for 1e5 entries.
_LARGEST_LOSS = 2 * 60 * UNIT_ROUNDOFF


def _target(clip_norm):
    """What is left of clip norms when the share for rounding a float32 sum is taken."""
    return jax.tree.map(lambda c: c / (1 + 2.0**-7), clip_norm)


def _jit(fun):
    return jax.jit(fun.__call__)


# The norm of one contribution.

_SHAPES = ((), (3,), (17, 5), (5000,), (4097,), (0,))
_DTYPES = {
    "float32": [jnp.float32],
    "mixed": [jnp.bfloat16, jnp.float32, jnp.float16],
}
_CLIPPINGS = [(1e-3, False), (1.0, True), (1e3, False), (1e3, True)]


def _random_tree(seed, scale, dtypes):
    rng = np.random.default_rng(seed)
    return [
        np.asarray(rng.normal(0, scale, shape), dtypes[i % len(dtypes)])
        for i, shape in enumerate(_SHAPES)
    ]


@pytest.mark.parametrize("name", _DTYPES)
def test_a_clipped_tree_has_at_most_the_clip_norm_and_little_less(name):
    clip = jax.jit(lambda tree: [clip_pytree(tree, *x)[0] for x in _CLIPPINGS])

    @hypothesis.settings(max_examples=10)
    @hypothesis.given(st.integers(0, 2**32 - 1), st.floats(-6, 3))
    def check(seed, log_scale):
        tree = _random_tree(seed, 10.0**log_scale, _DTYPES[name])
        norm = reference.norm(tree)
        for clipped, (clip_norm, rescale) in zip(clip(tree), _CLIPPINGS, strict=True):
            bound = 1.0 if rescale else clip_norm
            assert reference.has_norm_at_most(clipped, bound)
            expected = min(norm / clip_norm, 1) * bound
            assert reference.norm(clipped) >= expected * (1 - _LARGEST_LOSS)

    check()


def test_equal_entries_are_clipped_to_the_clip_norm():
    values = [
        (1 / 3, jnp.bfloat16),
        (1 / 3, jnp.float16),
        (1 / 3, jnp.float32),
        (1e-4, jnp.float16),  # its square underflows in float16
        (6e-8, jnp.float16),  # subnormal
        (300.0, jnp.float16),  # its square overflows in float16
        (2e13, jnp.bfloat16),
        (1e-15, jnp.float32),
    ]
    shapes = {"a": (2000,), "b": (3, 7)}
    trees = [{k: np.full(x, v, d) for k, x in shapes.items()} for v, d in values]
    clip_norms = [[v * ratio for ratio in (1.0, 44.0)] for v, _ in values]
    trees.append([np.full((4,), 1 / 3, jnp.bfloat16)] * 40)
    clip_norms.append([0.1])

    @jax.jit
    def clip(trees):
        pairs = zip(trees, clip_norms, strict=True)
        return [[clip_pytree(x, c)[0] for c in norms] for x, norms in pairs]

    flat = map(itertools.chain.from_iterable, (clip(trees), clip_norms))
    for clipped, clip_norm in zip(*flat, strict=True):
        assert reference.has_norm_at_most(clipped, clip_norm)
        assert reference.norm(clipped) >= clip_norm * (1 - _LARGEST_LOSS)


@pytest.mark.parametrize(
    ("rescale", "normalize_by", "arithmetic"),
    [(False, 3.0, "float32"), (True, 1.0, "exact"), (True, 1e-3, "float32")],
)
def test_per_layer_clip_norms_bound_each_part_and_the_whole(
    rescale, normalize_by, arithmetic
):
    clip_norms = {"a": 3.0, "b": [2.0, 100.0]}
    fun = clipped_fun(
        lambda x: x,
        l2_clip_norm=clip_norms,
        rescale_to_unit_norm=rescale,
        normalize_by=normalize_by,
        keep_batch_dim=False,
        arithmetic=arithmetic,
    )
    total = math.hypot(3.0, 2.0, 100.0)
    divisor = normalize_by * (total if rescale else 1)
    rng = np.random.default_rng(0)
    clip = _jit(fun)
    for scale in (1.0, 1e6):
        batch = {
            "a": {"w": rng.normal(0, scale, (1, 30)).astype(ml_dtypes.bfloat16)},
            "b": [
                rng.normal(0, scale, (1, 7)).astype(np.float32),
                rng.normal(0, scale, (1, 300)).astype(np.float32),
            ],
        }
        contribution = clip(batch)
        # The bound itself is computed in float64: 4 of its roundings.
        slack = 1 + 4 * 2.0**-53
        assert reference.has_norm_at_most(contribution["a"], 3.0 / divisor * slack)
        assert reference.has_norm_at_most(contribution["b"][0], 2.0 / divisor * slack)
        assert reference.has_norm_at_most(contribution["b"][1], 100.0 / divisor * slack)
        assert reference.has_norm_at_most(contribution, fun.sensitivity())
    expected = _target(fun.sensitivity())
    assert reference.norm(contribution) >= expected * (1 - _LARGEST_LOSS)


def test_limits_of_clip_norms_and_inputs():
    cases = [
        (0.0, True, [0.6, 0.8]),
        (math.inf, False, [3.0, 4.0]),
        (5.5, False, [3.0, 4.0]),
        (10.0, True, [0.3, 0.4]),
        (1.0, False, [0.6, 0.8]),
    ]
    clip = jax.jit(lambda tree: [clip_pytree(tree, c, r) for c, r, _ in cases])
    for (clipped, norm), (*_, expected) in zip(
        clip(np.float32([3.0, 4.0])), cases, strict=True
    ):
        np.testing.assert_allclose(clipped, expected, rtol=_LARGEST_LOSS)
        assert norm == 5.0
    for bad in (0.0, math.inf, -math.inf, math.nan, 3e38):
        for clipped, norm in clip(np.float32([min(bad, 1.0), bad])):
            assert not reference.exact_squared_norm(clipped)
            assert norm == 0 if bad == 0 else not np.isfinite(norm)


def test_what_is_not_finite_goes_through_unless_nan_safe():
    clip = jax.jit(lambda x: clip_pytree(x, 1.0, nan_safe=False)[0])
    assert np.isnan(clip(np.float32([1.0, np.nan]))).any()
    x = np.where(np.arange(_SIZE)[:, None] == 3, np.float32(np.nan), _X)
    for method, arithmetic in reference.FLOAT_SUMS.items():
        total = _cheap_sum(x, nan_safe=False, method=method, arithmetic=arithmetic)
        assert np.isnan(total["w"]).all()


def test_return_zero_selects_zero():
    def clip(tree, is_zero):
        return [clip_pytree(tree, 1.0, return_zero=zero) for zero in (True, is_zero)]

    for clipped, norm in jax.jit(clip)(np.ones(4, np.float32), True):
        assert not reference.exact_squared_norm(clipped)
        assert norm == 2.0


def test_float64_trees_stay_float64():
    with jax.enable_x64(True):
        tree = np.asarray([1e-200, 3e30, 4e30])
        clipped, norm = jax.jit(lambda x: clip_pytree(x, 1.0))(tree)
        assert clipped.dtype == norm.dtype == jnp.float64
        np.testing.assert_allclose(clipped[1:], [0.6, 0.8], rtol=_LARGEST_LOSS)
        assert reference.has_norm_at_most(clipped, 1.0)


# The sensitivity of the computed sum.


def test_the_sensitivity_is_the_clip_norm_and_twice_it_for_replace_one():
    fun = clipped_fun(lambda x: x, l2_clip_norm=3.0, normalize_by=2.0)
    assert fun.sensitivity() == 1.5
    for relation in _RELATIONS:
        twice = relation is _RELATIONS.REPLACE_ONE
        assert fun.sensitivity(relation) == 1.5 * (1 + twice)
    unsafe = clipped_fun(lambda x: x, l2_clip_norm=1.0, nan_safe=False)
    assert unsafe.sensitivity() == math.inf


def test_sums_of_book_keeping_are_proved_for_neighbours_of_equal_size():
    options = {"l2_clip_norm": 2.0, "method": "book_keeping"}
    bounded = clipped_grad(_loss, **options)
    unproved = clipped_grad(_loss, **options, arithmetic="unproved_float32")
    for relation in _RELATIONS:
        expected = 4.0 if relation is _RELATIONS.REPLACE_ONE else 2.0
        assert unproved.sensitivity(relation) == expected
        if relation is not _RELATIONS.ADD_OR_REMOVE_ONE:
            assert bounded.sensitivity(relation) == expected
    message = r"neighbours of equal size.*REPLACE_SPECIAL.*per_example"
    with pytest.raises(ValueError, match=message):
        bounded.sensitivity(_RELATIONS.ADD_OR_REMOVE_ONE)
    with pytest.raises(ValueError, match=r"with method=.per_example"):
        clipped_grad(_loss, **options, dtype=jnp.float32)


# Against the oracle.

_SIZE = 6


@functools.cache
def _stack(model, dtype=jnp.float32):
    params, batch = model.init(dtype), model.make_batch(3, _SIZE)
    losses, grads = models.per_example_losses_and_grads(model, params, batch)
    return params, batch, losses, grads


# Whatever the dtype of the gradients, their sum has float32 errors: 20 units for the
# norm, and as slack for a sum of six examples twice six times its depth of 3.
_TOLERANCE = 64 * 2.0**-23

# Two programs may round a loss of the model's own arithmetic differently.
_LOSS_TOLERANCE = {jnp.float32: 16 * 2.0**-23, jnp.bfloat16: 4 * 2.0**-8}


# Models, dtypes and microbatches in pairs.
@pytest.mark.parametrize(
    ("model", "dtype", "microbatch_size"),
    [
        (models.MLP, jnp.float32, None),
        (models.CONV, jnp.bfloat16, 2),
    ],
)
def test_the_sum_is_that_of_the_oracle(model, dtype, microbatch_size):
    params, batch, losses, stack = _stack(model, dtype)
    norms = reference.per_example_norms(stack)
    clip_norm = float(np.median(norms))
    fun = clipped_grad(
        model.loss,
        l2_clip_norm=clip_norm,
        microbatch_size=microbatch_size,
        return_values=True,
        return_grad_norms=True,
    )
    is_padding = np.arange(_SIZE) == 4
    total, sensitive = _jit(fun)(params, batch, is_padding_example=is_padding)
    expected = reference.clipped_sum(stack, _target(clip_norm), keep=~is_padding)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(total))
    reference.assert_trees_close(total, expected, rtol=_TOLERANCE)
    np.testing.assert_allclose(
        sensitive.grad_norms, np.where(is_padding, 0, norms), rtol=_TOLERANCE
    )
    expected = np.where(is_padding, 0, losses)
    rtol = _LOSS_TOLERANCE[dtype]
    np.testing.assert_allclose(sensitive.values, expected, rtol=rtol)


# A cheap loss, for everything that does not depend on the model.


def _loss(params, x):
    """Of which the gradient in `w` is `x`, and in `b` is 1, for one example."""
    return jnp.mean(x @ params["w"]) + params["b"]


def _mean_loss(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]))


_PARAMS = {"w": np.float32([0.5, -1.0, 2.0]), "b": np.float32(0.0)}
_X = np.random.default_rng(0).normal(size=(_SIZE, 3)).astype(np.float32)
_STACK = {"w": _X, "b": np.ones(_SIZE)}


@functools.cache
def _compiled(**options):
    """A compiled clipped gradient of the cheap loss, shared by tests."""
    return _jit(clipped_grad(_loss, **{"l2_clip_norm": 1.0, **options}))


def _cheap_sum(x=_X, is_padding_example=None, **options):
    if is_padding_example is None:
        is_padding_example = np.zeros(len(x), bool)
    return _compiled(**options)(_PARAMS, x, is_padding_example=is_padding_example)


def _assert_clipped(total, stack=_STACK, target=1 / (1 + 2.0**-7), **options):
    expected = reference.clipped_sum(stack, target, **options)
    reference.assert_trees_close(total, expected, rtol=_TOLERANCE)


# Every engine, with its float sums.
_EACH_ENGINE = pytest.mark.parametrize(
    "sums",
    [{"method": x, "arithmetic": y} for x, y in reference.FLOAT_SUMS.items()],
    ids=reference.FLOAT_SUMS,
)


@_EACH_ENGINE
def test_without_clipping_the_sum_is_the_gradient_of_the_sum(sums):
    fun = clipped_grad(_mean_loss, l2_clip_norm=math.inf, normalize_by=_SIZE, **sums)
    expected = jax.jit(jax.grad(_mean_loss))(_PARAMS, _X)
    assert fun.sensitivity() == math.inf
    reference.assert_trees_close(_jit(fun)(_PARAMS, _X), expected, rtol=_TOLERANCE)


@_EACH_ENGINE
def test_groups_are_clipped_as_one_and_their_sum_is_divided(sums):
    users = np.random.default_rng(1).normal(size=(4, 3, 3)).astype(np.float32)
    options = {"microbatch_size": 2, "keep_batch_dim": False} | sums
    options |= {"rescale_to_unit_norm": True, "normalize_by": 7.0}
    total = _cheap_sum(users, l2_clip_norm=0.5, **options)
    stack = {"w": users.mean(1), "b": np.ones(4)}
    _assert_clipped(total, stack, _target(0.5), divisor=0.5 * 7.0)


def test_a_pre_clipping_transform_gives_what_is_clipped():
    total = _cheap_sum(pre_clipping_transform=lambda g: 3.0 * g["w"])
    _assert_clipped(total, 3.0 * _X)


def test_only_the_outputs_asked_for_are_returned():
    def with_aux(params, x):
        return _loss(params, x), {"x": x}

    for asked_for in itertools.product([False, True], repeat=3):
        return_values, return_grad_norms, has_aux = asked_for
        fun = clipped_grad(
            with_aux if has_aux else _loss,
            has_aux=has_aux,
            l2_clip_norm=1.0,
            return_values=return_values,
            return_grad_norms=return_grad_norms,
        )
        output = jax.eval_shape(fun.__call__, _PARAMS, _X)
        if not any(asked_for):
            assert set(output) == {"w", "b"}
            continue
        _, sensitive = output
        assert isinstance(sensitive, clipping.AuxiliaryOutput)
        assert tuple(x is not None for x in sensitive) == asked_for
    _, sensitive = fun(_PARAMS, _X)
    expected = _X @ _PARAMS["w"]
    np.testing.assert_allclose(sensitive.values, expected, rtol=1e-6, atol=1e-6)
    expected = np.sqrt(1 + np.sum(_X**2, axis=1))
    np.testing.assert_allclose(sensitive.grad_norms, expected, rtol=1e-6)
    np.testing.assert_array_equal(sensitive.aux["x"], _X)


def test_outputs_of_padding_are_zero_whatever_it_holds():
    outputs = {"return_values": True, "return_grad_norms": True}
    of_padding = _cheap_sum(np.full_like(_X, np.nan), np.ones(_SIZE, bool), **outputs)
    assert not any(map(np.any, jax.tree.leaves(of_padding)))


def test_an_empty_batch_has_outputs_of_no_example():
    fun = clipped_fun(
        lambda x, key: (x, jax.random.uniform(key)),
        has_aux=True,
        l2_clip_norm=1.0,
        keep_batch_dim=False,
        microbatch_size=2,
        prng_argnum=1,
        return_norms=True,
    )
    total, rest = fun(np.zeros((0, 3), np.float32), jax.random.key(0))
    assert not reference.exact_squared_norm(total)
    assert total.shape == (3,)
    assert all(x.shape == (0,) for x in jax.tree.leaves(rest))


def test_microbatches_of_padding_are_skipped():
    seen = []

    def fun(x):
        jax.debug.callback(lambda x: seen.append(float(x)), x)
        return x

    clipped = clipped_fun(
        fun, l2_clip_norm=1.0, microbatch_size=2, keep_batch_dim=False
    )
    is_padding = np.array([False, False, True, True, True, False])
    total = _jit(clipped)(
        np.arange(6, dtype=np.float32) / 8, is_padding_example=is_padding
    )
    jax.block_until_ready(total)
    jax.effects_barrier()
    assert sorted(seen) == [0.0, 1 / 8, 4 / 8, 5 / 8]


def test_each_example_has_a_key_of_its_own_whatever_the_microbatch():
    keys = jax.random.key(0), jax.random.PRNGKey(0)
    drawn = [
        clipped_fun(
            lambda x, key: (x, jax.random.bits(key)),
            True,
            l2_clip_norm=1.0,
            prng_argnum=1,
            microbatch_size=size,
        )(_X, key)[1].tolist()
        for size, key in ((None, keys[0]), (1, keys[1]), (3, keys[0]))
    ]
    assert len(set(drawn[0])) == _SIZE
    assert drawn == drawn[:1] * 3


def test_batches_of_any_dtype_and_arrays_without_entries_are_taken():
    fun = clipped_fun(
        lambda batch: batch["x"].astype(jnp.float32),
        l2_clip_norm=1.0,
        keep_batch_dim=False,
    )
    expected = np.sqrt(0.5) * _target(1.0) + np.array([0.0, _target(1.0)])
    x = np.asarray([[0, 1], [1, 1]], bool)
    total = fun({"extras": np.zeros((2, 0), np.float32), "x": x})
    np.testing.assert_allclose(total, expected, rtol=_LARGEST_LOSS + 1e-7)


# Dtypes, memory and traces.


_MAY_BE_NARROW = {"reshape", "broadcast_in_dim", "slice", "squeeze", "cond", "scan"}
_MAY_BE_NARROW |= {"convert_element_type", "bitcast_convert_type", "transpose"}
_MAY_BE_NARROW |= {"jit", "pjit", "copy", "ne"}


@pytest.mark.parametrize(
    ("dtype", "microbatch_size"), [(jnp.bfloat16, None), (jnp.float16, 2)]
)
def test_half_precision_is_moved_and_widened_but_never_computed_with(
    dtype, microbatch_size
):
    fun = clipped_fun(
        lambda x: x,
        l2_clip_norm=1.0,
        return_norms=True,
        keep_batch_dim=False,
        microbatch_size=microbatch_size,
    )
    jaxpr = jax.make_jaxpr(fun.__call__)(jax.ShapeDtypeStruct((4, 5000), dtype))
    narrow = {
        eqn.primitive.name
        for eqn in equations(jaxpr.jaxpr)
        for var in (*eqn.invars, *eqn.outvars)
        if getattr(var.aval, "dtype", None) == dtype
    }
    assert narrow
    assert narrow <= _MAY_BE_NARROW
    assert {aval.dtype for aval in jaxpr.out_avals} == {jnp.dtype(jnp.float32)}


def test_memory_is_little_more_than_the_stack_in_its_own_dtype():
    # Many layers: a CPU computes the gradient of one of them in float32.
    size, width, num_layers = 64, 128, 8

    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x.astype(jnp.float32))

    params = [jax.ShapeDtypeStruct((width, width), jnp.bfloat16)] * num_layers
    x = jax.ShapeDtypeStruct((size, width), jnp.bfloat16)
    fun = clipped_grad(loss, l2_clip_norm=1.0)
    memory = _jit(fun).lower(params, x).compile().memory_analysis()
    stack = 2 * size * width**2 * num_layers
    assert memory.temp_size_in_bytes < 1.3 * stack


# What is refused, beyond tests/test_bad_inputs.py.


def _clip_outputs(*args, fun=lambda x: x, **options):
    calls = {k: options.pop(k) for k in ("is_padding_example",) if k in options}
    return clipped_fun(fun, l2_clip_norm=1.0, **options)(*args, **calls)


def _clip(loss=_loss, params=_PARAMS, **options):
    options = {"l2_clip_norm": 1.0, **options}
    return clipped_grad(loss, **options)(params, _X)


_COMPLEX = np.ones(3, np.complex64)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("positions, counted from 0", lambda: _clip_outputs(_X, batch_argnums=())),
        ("positions, counted from 0", lambda: _clip(argnums=(True,))),
        ("at least 2 posit", lambda: _clip_outputs(_X, batch_argnums=(0, 1))),
        ("one leading axis", lambda: _clip_outputs(())),
        ("pytree must hold at least", lambda: clip_pytree({}, 1.0)),
        ("output of fun must hold", lambda: _clip_outputs(_X, fun=lambda x: None)),
        ("must return a pair", lambda: _clip(has_aux=True)),
        ("must return a scalar", lambda: _clip(lambda w, x: x[0] * w["w"])),
        ("must return a scalar", lambda: _clip(lambda w, x: jnp.argmax(w["w"]))),
        ("output of fun must be a real", lambda: _clip_outputs(_COMPLEX)),
        (
            "pre_clipping_transform must be a real",
            lambda: _clip(pre_clipping_transform=lambda g: _COMPLEX),
        ),
        (
            "rounding may cost a sum",
            lambda: _clip_outputs(np.ones((4096, 3), np.float32), microbatch_size=1),
        ),
        (
            "must be one float scalar",
            lambda: jax.jit(functools.partial(clip_pytree, rescale_to_unit_norm=True))(
                (jnp.ones(2), jnp.ones(2)), (1.0, 1.0)
            ),
        ),
    ],
)
def test_what_does_not_fit_is_refused(message, call):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("method", "arithmetic"),
    [("per_example", "exact"), ("book_keeping", "bounded")],
)
def test_traced_clip_norms_clip_as_numbers_do(method, arithmetic):
    def clip(l2_clip_norm, x):
        fn = clipped_grad(
            _loss,
            l2_clip_norm=l2_clip_norm,
            rescale_to_unit_norm=True,
            normalize_by=2.0,
            method=method,
            arithmetic=arithmetic,
        )
        assert fn.sensitivity() == 0.5
        return fn(_PARAMS, x)

    compiled, norms = jax.jit(clip), (1e-3, 0.7, 1e4)
    as_numbers = jax.jit(lambda x: [clip(norm, x) for norm in norms])(_X)
    for norm, theirs in zip(norms, as_numbers, strict=True):
        ours = compiled(norm, _X)
        for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
            is_integer = jnp.issubdtype(a.dtype, jnp.integer)
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=4 if is_integer else 0)
    assert compiled._cache_size() == 1
    for clip_norm in (-1.0, 0.0, math.nan, math.inf, 1e30):
        zero = compiled(clip_norm, _X)
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(zero))


def test_a_part_of_the_batch_that_is_not_named_is_warned_of():
    def clip(*args, **kwargs):
        fun = clipped_grad(_squares, l2_clip_norm=1.0, **kwargs.pop("options", {}))
        jax.eval_shape(fun.__call__, *args, **kwargs)

    def _squares(w, x, y):
        return jnp.mean((jnp.sum(w * x) - y) ** 2)

    w, x, y = np.zeros(3, np.float32), np.ones((4, 3), np.float32), np.ones(4, "f")
    with pytest.warns(UserWarning, match="argument 2 has a leading axis like that"):
        clip(w, x, y)
    clip(w, x, y, options={"batch_argnums": (1, 2)})
    with pytest.warns(UserWarning, match="argument y has a leading axis like that"):
        clip(w, x, y=y)


@pytest.mark.parametrize("method", ["per_example", "book_keeping"])
def test_a_call_outside_of_jit_is_one_program(method):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append("backend_compile" in event)
    )
    fun = clipped_grad(_loss, l2_clip_norm=1.0, method=method, return_values=True)
    args = _PARAMS, _X
    masks = np.zeros(_SIZE, bool), np.arange(_SIZE) == 1
    compiled.clear()
    found = [fun(*args, is_padding_example=is_padding) for is_padding in masks]
    assert sum(compiled) <= 1  # none, if another test has compiled it
    within = [_jit(fun)(*args, is_padding_example=is_padding) for is_padding in masks]
    jax.tree.map(np.testing.assert_array_equal, found, within)


def test_arguments_that_are_no_arrays_stay_what_they_are():
    def loss(w, x, scale, rows, *, power):
        return jnp.sum(w * x[:, rows]) * (scale if scale > 1 else 0.0) ** power

    fun = clipped_grad(loss, l2_clip_norm=100.0)
    for scale, power in ((3.0, 1), (0.5, 1), (3.0, 2)):
        total = fun(1.0, _X, scale, np.array([True, False, True]), power=power)
        factor = (scale if scale > 1 else 0.0) ** power
        np.testing.assert_allclose(total, factor * _X[:, [0, 2]].sum(), rtol=1e-5)
    with pytest.raises(ValueError, match="must be a real float"):
        fun("w", _X, 2.0, 0, power=1)
