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

# What clipping takes from the norm: a few float32 roundings.
_TOLERANCE = 64 * 2.0**-23


def _summed(loss, l2_clip_norm, method="book_keeping", **options):
    arithmetic = reference.FLOAT_SUMS[method]
    fun = clipped_grad(
        loss, l2_clip_norm=l2_clip_norm, method=method, arithmetic=arithmetic, **options
    )
    return jax.jit(fun.__call__)


def _assert_clipped(total, stack, l2_clip_norm):
    # A share is reserved for the rounding of float32 sums.
    targets = jax.tree.map(lambda x: x / (1 + 2.0**-7), l2_clip_norm)
    expected = reference.clipped_sum(stack, targets)
    reference.assert_trees_close(total, expected, rtol=_TOLERANCE)


def test_parameters_of_one_weight_are_clipped_apart():
    model = models.ZOO["weight_norm"]
    params, batch = model.init(jnp.float32), model.make_batch(3, 6)
    clip_norms = {"direction": 0.05, "size": 0.1, "shift": 0.2, "out": 1.0}
    total = _summed(model.loss, clip_norms)(params, batch)
    _, stack = models.per_example_losses_and_grads(model, params, batch)
    _assert_clipped(total, stack, clip_norms)


@pytest.mark.slow
def test_windows_of_many_examples_are_seen_a_few_examples_at_a_time():
    def loss(kernel, image):
        return jnp.mean(jnp.tanh(jax.lax.conv(image, kernel, (1, 1), "SAME")))

    kernel = jax.random.normal(jax.random.key(0), (3, 2, 3, 3))
    images = jax.random.normal(jax.random.key(1), (41, 2, 8, 8))
    stack = jax.vmap(jax.grad(loss), in_axes=(None, 0))(kernel, images[:, None])
    _assert_clipped(_summed(loss, 0.01)(kernel, images), stack, 0.01)


def test_per_example_gradients_are_never_materialized():
    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    def largest_array(method):
        program = jax.make_jaxpr(_summed(loss, 1.0, method))(params, x)
        outputs = [var for eqn in equations(program.jaxpr) for var in eqn.outvars]
        return max(math.prod(var.aval.shape) for var in outputs)

    size, width = 16, 64
    params = [np.ones((width, width), np.float32)] * 2
    x = np.ones((size, width), np.float32)
    assert largest_array("per_example") >= size * width**2
    assert largest_array("book_keeping") <= width**2


def test_losses_are_traced_once_for_all_microbatches():
    traces = []

    def loss(w, x):
        traces.append(None)
        return jnp.mean(x @ w)

    clipped_sum = _summed(loss, 1.0, microbatch_size=2)
    for is_padding in (np.zeros(6, bool), np.ones(6, bool)):
        args = np.ones(3, np.float32), np.ones((6, 3), np.float32)
        clipped_sum(*args, is_padding_example=is_padding)
    assert len(traces) == 1
