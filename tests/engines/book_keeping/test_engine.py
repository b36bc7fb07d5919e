"""How gradients of book-keeping are clipped, and what it is for.

`tests/contract/test_engines.py` has what every engine must do, for the zoo.
"""

import functools
import math

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
import reference
from programs import equations

from dpmp.clipping import clipped_grad
from dpmp.engines._signature import Signature, check_loss
from dpmp.engines.book_keeping import _engine

_SIZE = 6

# What clipping takes from the norm: a few float32 roundings.
_TOLERANCE = 64 * 2.0**-23


def _assert_same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def _mixed(batch, others, is_kept):
    return jax.tree.map(
        lambda x, y: np.where(is_kept.reshape(-1, *[1] * (x.ndim - 1)), x, y),
        batch,
        others,
    )


@pytest.mark.parametrize(
    "model", [models.CONV, models.TRANSFORMER], ids=lambda m: m.name
)
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


# A cheap loss, for everything that does not depend on the model.


def _loss(params, batch):
    rows = params["table"][batch["ids"]]
    return jnp.mean(jnp.tanh((batch["x"] * rows) @ params["w"] + params["b"]))


def _make_params():
    rng = np.random.default_rng(0)
    shapes = {"table": (5, 3), "w": (3, 2), "b": (2,)}
    return {k: np.float32(rng.normal(size=x)) for k, x in shapes.items()}


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("microbatch_size", "compiled"), [(None, True), (1, True), (2, True), (None, False)]
)
def test_neither_microbatches_nor_compilation_change_the_sum(microbatch_size, compiled):
    total = _sum(microbatch_size=microbatch_size, compiled=compiled)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(total))
    reference.assert_trees_close(total, _oracle(), rtol=_TOLERANCE)


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
        (
            _USERS,
            {
                "keep_batch_dim": False,
                "microbatch_size": 2,
                "rescale_to_unit_norm": True,
                "normalize_by": 7.0,
            },
            {"divisor": 0.1 * 7.0},
        ),
        (_BATCH, {"l2_clip_norm": _CLIP_NORMS}, {"l2_clip_norm": _CLIP_NORMS}),
        (_BATCH, {"l2_clip_norm": math.inf}, {"l2_clip_norm": math.inf}),
    ],
    ids=["groups", "layers", "infinite"],
)
def test_options_of_clipping_mean_what_they_say(batch, options, expected):
    oracle = _oracle(batch, **expected)
    reference.assert_trees_close(_sum(batch, **options), oracle, rtol=_TOLERANCE)


def test_parameters_of_one_weight_are_clipped_apart():
    model = models.ZOO["weight_norm"]
    params, batch = model.init(jnp.float32), model.make_batch(3, _SIZE)
    clip_norms = {"direction": 0.05, "size": 0.1, "shift": 0.2, "out": 1.0}
    fun = clipped_grad(
        model.loss,
        l2_clip_norm=clip_norms,
        method="book_keeping",
        arithmetic="unproved_float32",
    )
    stack = models.per_example_grads(model, params, batch)
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
    params = [np.ones((width, width), np.float32)] * 2
    x = np.ones((size, width), np.float32)
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
