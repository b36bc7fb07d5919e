"""How gradients of book-keeping are clipped, and what it is for.

`tests/contract/test_engines.py` has what every engine must do, for the zoo.
"""

import math

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
import reference
from programs import equations

from dpmp.clipping import clipped_grad

_SIZE = 6

# What clipping takes from the norm: a few float32 roundings.
_TOLERANCE = 64 * 2.0**-23


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


def _summed(loss, l2_clip_norm=0.1, method="book_keeping", **options):
    arithmetic = reference.FLOAT_SUMS[method]
    fun = clipped_grad(
        loss, l2_clip_norm=l2_clip_norm, method=method, arithmetic=arithmetic, **options
    )
    return jax.jit(fun.__call__)


def _sum(batch=_BATCH, **options):
    return _summed(_loss, **options)(_PARAMS, batch)


def _oracle(batch=_BATCH, l2_clip_norm=0.1, *, divisor=1.0):
    return _clipped(_stack_fn(_PARAMS, batch), l2_clip_norm, divisor=divisor)


_stack_fn = jax.jit(jax.vmap(jax.grad(_loss), in_axes=(None, 0)))


def _clipped(stack, l2_clip_norm, **options):
    targets = jax.tree.map(lambda x: x / _SLACK, l2_clip_norm)
    return reference.clipped_sum(stack, targets, **options)


_CLIP_NORMS = {"table": 0.02, "w": 0.05, "b": 10.0}
_USERS = _make_batch(4, 3, 4)


# A batch, options, and the same for the oracle.
@pytest.mark.parametrize(
    ("batch", "options", "expected"),
    [
        (
            _USERS,
            {"keep_batch_dim": False, "microbatch_size": 2}
            | {"rescale_to_unit_norm": True, "normalize_by": 7.0},
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
    expected = _clipped(
        models.per_example_losses_and_grads(model, params, batch)[1], clip_norms
    )
    total = _summed(model.loss, clip_norms)(params, batch)
    reference.assert_trees_close(total, expected, rtol=_TOLERANCE)


@pytest.mark.slow
def test_windows_of_many_examples_are_seen_a_few_examples_at_a_time():
    def loss(kernel, image):
        return jnp.mean(jnp.tanh(jax.lax.conv(image, kernel, (1, 1), "SAME")))

    kernel = jax.random.normal(jax.random.key(0), (3, 2, 3, 3))
    images = jax.random.normal(jax.random.key(1), (41, 2, 8, 8))
    stack = jax.vmap(jax.grad(loss), in_axes=(None, 0))(kernel, images[:, None])
    total = _summed(loss, 0.01)(kernel, images)
    reference.assert_trees_close(total, _clipped(stack, 0.01), rtol=_TOLERANCE)


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
        fun = _summed(loss, 1.0, method)
        largest[method] = _largest_array(jax.make_jaxpr(fun)(params, x).jaxpr)
    assert largest["per_example"] >= size * width**2
    assert largest["book_keeping"] <= width**2


def test_losses_are_traced_once_for_all_microbatches():
    traces = []

    def loss(params, batch):
        traces.append(None)
        return _loss(params, batch)

    clipped_sum = _summed(loss, microbatch_size=2)
    for is_padding in (np.zeros(_SIZE, bool), np.ones(_SIZE, bool)):
        clipped_sum(_PARAMS, _BATCH, is_padding_example=is_padding)
    assert len(traces) == 1
