"""Warnings point at the line of the user, also through dpmp and jax."""

import contextlib
import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpmp
from dpmp._warnings import warn


def raised_at(function):
    """The file and line that the only warning of a call points at."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    (warning,) = caught
    return warning.filename, warning.lineno


def line_of(function):
    return inspect.getsourcefile(function), inspect.getsourcelines(function)[1] + 1


def plainly():
    warn("here")


def in_jax():
    jax.eval_shape(functools.partial(warn, "while jax traces"))


STACK = contextlib.ExitStack()


STACK.callback(warn, "when a context ends")


def in_a_context():
    STACK.close()


def dropout(params, x):
    keep = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
    return jnp.mean(jnp.where(keep, x, 0) @ params)


TRAINER = dpmp.DPTrainer(
    mechanism=dpmp.DPSGD(
        num_examples=8,
        expected_batch_size=4,
        iterations=1,
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
    ),
    loss_fn=dropout,
    optimizer=optax.sgd(0.1),
    policy="float32",
)


def in_fit():
    TRAINER.fit(TRAINER.init(jnp.ones(3)), np.ones((8, 3), np.float32), progress=False)


def loss(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


SHARED = dpmp.clipped_grad(loss, l2_clip_norm=1.0)


def about_arguments():
    SHARED(jnp.ones(3), jnp.ones((4, 3)), jnp.ones(4))


@pytest.mark.parametrize(
    "function", [plainly, in_jax, in_a_context, in_fit, about_arguments]
)
def test_a_warning_points_at_the_line_that_called_dpmp(function):
    assert raised_at(function) == line_of(function)
