"""Warnings point at the line of the user, also through dpmp and jax."""

import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import pytest
from small_runs import DATA, PARAMS, new_trainer

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


def dropout(params, batch):
    keep = jax.random.bernoulli(jax.random.key(0), 0.5, batch["x"].shape)
    return jnp.mean(jnp.where(keep, batch["x"], 0) @ params["w"])


TRAINER = new_trainer(loss_fn=dropout)


def in_fit():
    TRAINER.fit(TRAINER.init(PARAMS), DATA, progress=False)


@pytest.mark.parametrize("function", [plainly, in_jax, in_fit])
def test_a_warning_points_at_the_line_that_called_dpmp(function):
    assert raised_at(function) == line_of(function)
