"""Book-keeping gives what the vmap engine gives, for the zoo; and how it is clipped.

`tests/contract/test_engines.py` has what every engine must do.
"""

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import models
import more_models
import numpy as np
import pytest
import reference
from models import Model
from programs import equations

from dpmp.clipping import clipped_grad
from dpmp.engines._signature import Signature, check_loss
from dpmp.engines.book_keeping import _engine

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
_SIZE = 6

# Float32 roundings: of the model's own sums, which each engine has in an order of its
# own, and of the norm's; there are six examples and fewer than 64 positions.
_FLOAT32_ERROR = 16 * 2.0**-23

# What clipping takes from the norm: a few float32 roundings, and 2^-8 for what the
# weighted factors of a gradient can grow by when they are rounded to bfloat16. They may
# as well shrink by as much.
_CLIPPING_ERROR = {
    jnp.float32: 64 * 2.0**-23,
    jnp.float16: 64 * 2.0**-23,
    jnp.bfloat16: 2 * 2.0**-8,
}

# The error of a half-precision gradient is mostly that of activations, which both
# engines have in common. The rest is independent, and so may be larger by chance.
_BY_CHANCE = 1.5


def _weighted(model: Model) -> Model:
    """With a weight for each example, so that all batches have floats in them."""

    def loss(params: Any, batch: Any) -> jax.Array:
        return batch["weight"][0] * model.loss(params, batch["inputs"])

    def make_batch(seed: int, size: int) -> Any:
        weight = np.random.default_rng(seed).uniform(0.5, 2.0, size)
        inputs = model.make_batch(seed, size)
        return {"inputs": inputs, "weight": jnp.asarray(weight, jnp.float32)}

    return Model(model.name, model.init, loss, make_batch)


_ZOO = {x.name: _weighted(x) for x in (*models.ZOO, *more_models.PARAMETER_USES)}


class Case(NamedTuple):
    """A model in some precision, and what is known of its gradients.

    Attributes:
      stack: the gradients as jax computes them.
      wide: those of the model in float32, for the same parameters.
      l2_clip_norm: larger than the norms of four of the examples.
      is_small: whether the gradient of an example is not to be clipped, (B,).
      run: `run(batch, is_padding)` gives the clipped sum and all other outputs.
    """

    model: Model
    dtype: Any
    batch: Any
    stack: Any
    wide: Any
    l2_clip_norm: float
    is_small: np.ndarray
    run: Callable[..., Any]


@functools.lru_cache(maxsize=4)
def _make_case(name: str, dtype: Any) -> Case:
    model = _ZOO[name]
    params, batch = model.init(dtype), model.make_batch(3, _SIZE)
    wide_params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    stack, wide = (_grads(model)(x, batch) for x in (params, wide_params))
    norms = reference.per_example_norms(wide)
    clip_norm = 1.03 * np.sort(norms)[3]
    clipped_sum = _clipped_sum(model, clip_norm)

    def run(batch: Any, is_padding: np.ndarray | None = None) -> Any:
        is_padding = np.zeros(_SIZE, bool) if is_padding is None else is_padding
        return clipped_sum(params, batch, is_padding)

    is_small = norms < 0.99 * clip_norm
    return Case(model, dtype, batch, stack, wide, clip_norm, is_small, run)


@functools.cache
def _grads(model: Model) -> Callable[..., Any]:
    def loss(params: Any, example: Any) -> jax.Array:
        return model.loss(params, jax.tree.map(lambda x: x[None], example))

    return jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))


def _clipped_sum(model: Model, l2_clip_norm: float) -> Callable[..., Any]:
    """Sums that have the whole clip norm, with what is reserved for rounding."""
    fun = clipped_grad(
        model.loss,
        l2_clip_norm=l2_clip_norm * _SLACK,
        return_values=True,
        return_grad_norms=True,
        method="book_keeping",
        arithmetic="unproved_float32",
    )
    compiled = jax.jit(fun.__call__)

    def run(params: Any, batch: Any, is_padding: np.ndarray) -> Any:
        total, sensitive = compiled(params, batch, is_padding_example=is_padding)
        return jax.tree.map(reference.float64_values, total), sensitive

    return run


# Left to the slow tests: what takes seconds to compile.
_SLOW = {"decoder", "decoder-tied", "decoder-scan", "decoder-remat"}
_SLOW |= {"decoder-scan-remat-tied", "group_norm_cnn", "vit", "experts", "nested_loops"}

# Half precision is much the same for models that are much the same.
_IN_FLOAT16 = {"conv", "lstm", "weight_norm"}
_NOT_IN_BFLOAT16 = {"decoder-tied", "decoder-scan", "gru-reversed", "regularised"}
_NOT_IN_BFLOAT16 |= {"mlp", "lora", "shared"}
_CASES = [
    *((name, "float32") for name in _ZOO),
    *((name, "bfloat16") for name in _ZOO if name not in _NOT_IN_BFLOAT16),
    *((name, "float16") for name in _ZOO if name in _IN_FLOAT16),
]


# Of module scope, so that the tests of a case come one after another.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            (name, dtype),
            id=f"{name}-{dtype}",
            marks=[pytest.mark.slow] if name in _SLOW else [],
        )
        for name, dtype in _CASES
    ],
)
def case(request):
    name, dtype = request.param
    return _make_case(name, _DTYPES[dtype])


def _all_but(i):
    return np.arange(_SIZE) != i


def _assert_same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


# Against the exact oracle, and in half precision against the model in float32.


def test_norms_and_sums_are_as_good_as_those_of_the_vmap_engine(case):
    assert 1 <= np.sum(case.is_small) <= _SIZE - 1  # some examples are clipped
    total, sensitive = case.run(case.batch, ~case.is_small)
    expected, of_vmap = (
        reference.clipped_sum(stack, math.inf, keep=case.is_small)
        for stack in (case.wide, case.stack)
    )
    allowed = _BY_CHANCE * reference.relative_distance(of_vmap, expected)
    error = reference.relative_distance(total, expected)
    assert error <= _FLOAT32_ERROR + allowed

    expected, of_vmap = map(reference.per_example_norms, (case.wide, case.stack))
    norms = np.where(case.is_small, sensitive.grad_norms, expected)
    error, allowed = (
        np.linalg.norm(x / expected - 1) / math.sqrt(_SIZE) for x in (norms, of_vmap)
    )
    assert error <= _FLOAT32_ERROR + _BY_CHANCE * allowed


def test_every_leaf_of_a_clipped_sum_is_as_good_as_that_of_the_vmap_engine(case):
    total, _ = case.run(case.batch, ~_all_but(4))
    expected, of_vmap = (
        reference.clipped_sum(stack, case.l2_clip_norm, keep=_all_but(4))
        for stack in (case.wide, case.stack)
    )
    for leaf, expected_leaf, leaf_of_vmap in zip(
        *map(jax.tree.leaves, (total, expected, of_vmap)), strict=True
    ):
        if not np.any(expected_leaf):
            assert not np.any(leaf)
            continue
        allowed = _BY_CHANCE * reference.relative_distance(leaf_of_vmap, expected_leaf)
        allowed += _CLIPPING_ERROR[case.dtype]
        assert reference.relative_distance(leaf, expected_leaf) <= allowed


# Contributions of examples.


def _assert_clipped(contribution, norm, l2_clip_norm, dtype):
    """At most the clip norm, to a millionth, and not much less than there is."""
    bound = Fraction(l2_clip_norm) * (1 + Fraction(1, 10**6))
    assert reference.exact_squared_norm(contribution) <= bound**2
    least = (1 - 2 * _CLIPPING_ERROR[dtype]) * min(norm, l2_clip_norm)
    assert reference.norm(contribution) >= least


def test_an_example_contributes_at_most_the_clip_norm(case):
    for i in range(_SIZE):
        total, sensitive = case.run(case.batch, _all_but(i))
        norm = sensitive.grad_norms[i]
        _assert_clipped(total, norm, case.l2_clip_norm, case.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", _DTYPES.values(), ids=_DTYPES)
@pytest.mark.parametrize("name", ["mlp", "conv", "weight_norm"])
def test_a_batch_of_one_contributes_at_most_the_clip_norm(name, dtype):
    model, l2_clip_norm = _ZOO[name], 2.0**-5
    params, batch = model.init(dtype), model.make_batch(3, _SIZE)
    run = _clipped_sum(model, l2_clip_norm)
    for i in range(_SIZE):
        example = jax.tree.map(lambda x, i=i: x[i : i + 1], batch)
        total, sensitive = run(params, example, np.zeros(1, bool))
        assert sensitive.grad_norms[0] > l2_clip_norm
        _assert_clipped(total, sensitive.grad_norms[0], l2_clip_norm, dtype)


def _mixed(batch, others, is_kept):
    return jax.tree.map(
        lambda x, y: jnp.where(is_kept.reshape(-1, *[1] * (x.ndim - 1)), x, y),
        batch,
        others,
    )


def test_no_bit_of_an_example_depends_on_the_others(case):
    is_kept = np.arange(_SIZE) % 2 == 0
    mixed = _mixed(case.batch, case.model.make_batch(4, _SIZE), is_kept)
    for i in np.flatnonzero(is_kept):
        (total, sensitive), (total_beside_others, beside_others) = (
            case.run(batch, _all_but(i)) for batch in (case.batch, mixed)
        )
        _assert_same(total_beside_others, total)
        _assert_same(beside_others, sensitive)


@pytest.mark.parametrize("model", models.ZOO, ids=lambda m: m.name)
def test_no_bit_that_is_cached_depends_on_the_other_examples(model):
    signature = Signature.parse(argnums=0, batch_argnums=1)
    loss_fn = signature.of_one_example(model.loss, check_loss)
    run = _engine.Engine(loss_fn, signature, is_bounded=False)
    params, batch = model.init(jnp.bfloat16), model.make_batch(3, _SIZE)
    mixed = _mixed(batch, model.make_batch(4, _SIZE), np.arange(_SIZE) < 3)
    cache = jax.jit(lambda batch: run(params, batch).cached)
    cached = [jax.tree.map(lambda x: x[:3], cache(x)) for x in (batch, mixed)]
    assert jax.tree.leaves(cached)
    _assert_same(*cached)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_example_that_is_not_finite_contributes_zero(case, bad):
    def spoil(x):
        return x.at[3].set(bad) if jnp.issubdtype(x.dtype, jnp.floating) else x

    without, expected = case.run(case.batch, ~_all_but(3))
    total, sensitive = case.run(jax.tree.map(spoil, case.batch))
    _assert_same(total, without)
    assert not np.isfinite(sensitive.grad_norms[3])
    for actual, of_others in zip(sensitive[:2], expected[:2], strict=True):
        np.testing.assert_array_equal(actual[_all_but(3)], of_others[_all_but(3)])


# A cheap loss, for everything that does not depend on the model.


def _loss(params, batch):
    rows = params["table"][batch["ids"]]
    return jnp.mean(jnp.tanh((batch["x"] * rows) @ params["w"] + params["b"]))


def _make_params():
    rng = np.random.default_rng(0)
    shapes = {"table": (5, 3), "w": (3, 2), "b": (2,)}
    return {k: jnp.asarray(rng.normal(size=x), jnp.float32) for k, x in shapes.items()}


def _make_batch(*shape):
    rng = np.random.default_rng(1)
    return {
        "x": rng.normal(size=(*shape, 3)).astype(np.float32),
        "ids": rng.integers(5, size=shape).astype(np.int32),
    }


_PARAMS = _make_params()
_BATCH = _make_batch(_SIZE, 4)

# The share that is reserved for the rounding of float32 sums.
_SLACK = 1 + 2.0**-7


def _make_sum(*, compiled=True, loss=_loss, **kwargs):
    kwargs = {
        "l2_clip_norm": 0.1,
        "method": "book_keeping",
        "arithmetic": "unproved_float32",
        **kwargs,
    }
    fun = clipped_grad(loss, **kwargs).__call__
    return functools.partial(jax.jit(fun) if compiled else fun, _PARAMS)


def _sum(batch=_BATCH, **kwargs):
    return _make_sum(**kwargs)(batch)


@functools.cache
def _stack_fn(loss):
    return jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))


def _oracle(batch=_BATCH, l2_clip_norm=0.1, *, loss=_loss, keep=None, divisor=1.0):
    stack = _stack_fn(loss)(_PARAMS, batch)
    targets = jax.tree.map(lambda x: x / _SLACK, l2_clip_norm)
    return reference.clipped_sum(stack, targets, keep=keep, divisor=divisor)


_TOLERANCE = _CLIPPING_ERROR[jnp.float32]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("microbatch_size", "compiled"),
    [(None, True), (1, True), (2, True), (None, False)],
)
def test_neither_microbatches_nor_compilation_change_the_sum(microbatch_size, compiled):
    total = _sum(microbatch_size=microbatch_size, compiled=compiled)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(total))
    reference.assert_trees_close(total, _oracle(), rtol=_TOLERANCE)


@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_padding_does_not_change_the_sum_whatever_it_holds(microbatch_size):
    is_padding = np.array([False, True, False, False, True, True])
    fun = _make_sum(
        microbatch_size=microbatch_size, return_values=True, return_grad_norms=True
    )
    expected, _ = fun(_BATCH, is_padding_example=is_padding)
    oracle = _oracle(keep=~is_padding)
    reference.assert_trees_close(expected, oracle, rtol=_TOLERANCE)
    for value in (0.0, 1e38, math.inf, math.nan):
        x = np.where(is_padding[:, None, None], np.float32(value), _BATCH["x"])
        total, _ = fun({**_BATCH, "x": x}, is_padding_example=is_padding)
        _assert_same(total, expected)

    batch = {**_BATCH, "x": np.full_like(_BATCH["x"], np.nan)}
    total, sensitive = fun(batch, is_padding_example=np.ones(_SIZE, bool))
    assert not reference.exact_squared_norm(total)
    assert not np.any(sensitive.values)
    assert not np.any(sensitive.grad_norms)


@pytest.mark.parametrize(("microbatch_size", "compiled"), [(None, False), (2, True)])
def test_an_empty_batch_gives_zero(microbatch_size, compiled):
    total, sensitive = _sum(
        _make_batch(0, 4),
        microbatch_size=microbatch_size,
        compiled=compiled,
        return_values=True,
        return_grad_norms=True,
    )
    assert jax.tree.map(jnp.shape, total) == jax.tree.map(jnp.shape, _PARAMS)
    assert not reference.exact_squared_norm(total)
    assert all(x.shape == (0,) for x in sensitive[:2])


def test_what_is_not_finite_reaches_the_sum_unless_nan_safe():
    x = _BATCH["x"].copy()
    x[3] = math.nan
    assert np.isnan(_sum({**_BATCH, "x": x}, nan_safe=False)["w"]).all()


_CLIP_NORMS = {"table": 0.02, "w": 0.05, "b": 10.0}
_USERS = _make_batch(4, 3, 4)


# A batch, options, and the same for the oracle.
@pytest.mark.parametrize(
    ("batch", "options", "expected"),
    [
        (_USERS, {"keep_batch_dim": False, "microbatch_size": 2}, {}),
        (_BATCH, {"l2_clip_norm": _CLIP_NORMS}, {"l2_clip_norm": _CLIP_NORMS}),
        (_BATCH, {"l2_clip_norm": math.inf}, {"l2_clip_norm": math.inf}),
        (
            _BATCH,
            {"rescale_to_unit_norm": True, "normalize_by": 7.0},
            {"divisor": 0.1 * 7.0},
        ),
    ],
    ids=["groups", "layers", "infinite", "rescaled"],
)
def test_options_of_clipping_mean_what_they_say(batch, options, expected):
    oracle = _oracle(batch, **expected)
    reference.assert_trees_close(_sum(batch, **options), oracle, rtol=_TOLERANCE)


def test_parameters_of_one_weight_are_clipped_apart():
    model = _ZOO["weight_norm"]
    params, batch = model.init(jnp.float32), model.make_batch(3, _SIZE)
    clip_norms = {"direction": 0.05, "size": 0.1, "shift": 0.2, "out": 1.0}
    fun = clipped_grad(
        model.loss,
        l2_clip_norm=clip_norms,
        method="book_keeping",
        arithmetic="unproved_float32",
    )
    stack = _grads(model)(params, batch)
    targets = {name: x / _SLACK for name, x in clip_norms.items()}
    expected = reference.clipped_sum(stack, targets)
    total = jax.jit(fun.__call__)(params, batch)
    reference.assert_trees_close(total, expected, rtol=_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("microbatch_size", "make_key"), [(None, jax.random.key), (2, jax.random.PRNGKey)]
)
def test_dropout_is_that_of_the_vmap_engine(microbatch_size, make_key):
    def loss(params, batch, key):
        x = batch["x"] * params["table"][batch["ids"]]
        is_kept = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.mean(jnp.where(is_kept, 2 * x, 0) @ params["w"])

    def clipped(method, size):
        fun = clipped_grad(
            loss,
            l2_clip_norm=0.1,
            prng_argnum=2,
            microbatch_size=size,
            method=method,
            arithmetic=reference.FLOAT_SUMS[method],
            return_values=True,
        )
        return jax.jit(fun.__call__)(_PARAMS, _BATCH, make_key(0))

    expected, expected_sensitive = clipped("per_example", None)
    total, sensitive = clipped("book_keeping", microbatch_size)
    assert len(set(np.asarray(sensitive.values).tolist())) == _SIZE
    np.testing.assert_allclose(sensitive.values, expected_sensitive.values, rtol=1e-5)
    reference.assert_trees_close(total, expected, rtol=_TOLERANCE)


@pytest.mark.slow
def test_windows_of_many_examples_are_seen_a_few_examples_at_a_time():
    def loss(kernel, image):
        return jnp.mean(jnp.tanh(jax.lax.conv(image, kernel, (1, 1), "SAME")))

    kernel = jax.random.normal(jax.random.key(0), (3, 2, 3, 3))
    images = jax.random.normal(jax.random.key(1), (41, 2, 8, 8))
    fun = clipped_grad(
        loss, l2_clip_norm=0.01, method="book_keeping", arithmetic="unproved_float32"
    )
    stack = jax.vmap(jax.grad(loss), in_axes=(None, 0))(kernel, images[:, None])
    expected = reference.clipped_sum(stack, 0.01 / _SLACK)
    total = jax.jit(fun.__call__)(kernel, images)
    reference.assert_trees_close(total, expected, rtol=_TOLERANCE)


# Devices.


def _data_mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


_WIDE_BATCH = _make_batch(16, 4)


def test_a_sharded_batch_gives_the_same_sum():
    sharding = jax.NamedSharding(_data_mesh(), jax.P("data"))
    sharded = jax.device_put(_WIDE_BATCH, sharding)
    total = _sum(sharded, microbatch_size=8)
    reference.assert_trees_close(total, _oracle(_WIDE_BATCH), rtol=_TOLERANCE)


# What it is for.


def _largest_array(jaxpr):
    arrays = (
        math.prod(var.aval.shape)
        for eqn in equations(jaxpr)
        for var in eqn.outvars
        if hasattr(var.aval, "shape")
    )
    return max(arrays)


def test_per_example_gradients_are_never_materialized():
    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    size, width = 16, 64
    params, x = [jnp.ones((width, width))] * 2, jnp.ones((size, width))
    largest = {}
    for method in ("per_example", "book_keeping"):
        fun = clipped_grad(
            loss,
            l2_clip_norm=1.0,
            method=method,
            arithmetic=reference.FLOAT_SUMS[method],
        )
        largest[method] = _largest_array(jax.make_jaxpr(fun.__call__)(params, x).jaxpr)
    assert largest["per_example"] >= size * width**2
    assert largest["book_keeping"] <= width**2


def test_losses_are_traced_once_for_all_microbatches():
    traces = []

    def loss(params, batch):
        traces.append(None)
        return _loss(params, batch)

    fun = clipped_grad(
        loss,
        l2_clip_norm=0.1,
        microbatch_size=2,
        method="book_keeping",
        arithmetic="unproved_float32",
    )
    clipped_sum = jax.jit(fun.__call__)
    for is_padding in (np.zeros(_SIZE, bool), np.ones(_SIZE, bool)):
        clipped_sum(_PARAMS, _BATCH, is_padding_example=is_padding)
    assert len(traces) == 1
