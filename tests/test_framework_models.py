"""Models as people write them, in the libraries they use."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from models import libraries as framework_models

import dpmp


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # as the libraries need it
        yield


# Compilation of these models takes most of a minute on two cores.
slow = pytest.mark.slow

every_model = pytest.mark.parametrize("name", framework_models.MODELS)


@functools.cache
def grads_one_by_one(name):
    """The gradients of all examples, stacked, in float64."""
    task = framework_models.make(name)
    grad = jax.jit(jax.grad(task.loss_fn))
    grads = [
        grad(task.params, jax.tree.map(lambda x, i=i: x[i : i + 1], task.batch))
        for i in range(len(jax.tree.leaves(task.batch)[0]))
    ]
    return jax.tree.map(lambda *leaves: np.stack(leaves).astype(np.float64), *grads)


@slow
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((name, "book_keeping") for name in framework_models.MODELS),
        ("keras_lstm", "per_example"),
    ],
)
def test_norms_and_sums_are_those_of_gradients_one_by_one(name, method):
    task, stack = framework_models.make(name), grads_one_by_one(name)
    norms = reference.per_example_norms(stack)
    clip_norm = float(np.median(norms))
    clipped_grad = dpmp.clipped_grad(
        task.loss_fn,
        l2_clip_norm=clip_norm,
        method=method,
        arithmetic=reference.FLOAT_SUMS[method],
        return_grad_norms=True,
    )
    total, sensitive = jax.jit(clipped_grad.__call__)(task.params, task.batch)
    np.testing.assert_allclose(sensitive.grad_norms, norms, rtol=1e-5)
    # A share of the clip norm is reserved for rounding.
    expected = reference.clipped_sum(stack, clip_norm / (1 + 2.0**-7))
    size = reference.norm(expected)
    for got, wanted in zip(*map(jax.tree.leaves, (total, expected)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=1e-5 * size)


def _warning_of_float32_in(name):
    """These models cast activations or parameters back, as people write them."""
    if name not in ("nnx_gemma", "keras_lstm"):
        return contextlib.nullcontext()
    return pytest.warns(UserWarning, match="computes no product in bfloat16")


@slow
@every_model
def test_a_step_in_mixed_bfloat16_runs(name):
    task = framework_models.make(name)
    mechanism = dpmp.DPSGD(
        num_examples=4,
        expected_batch_size=4,
        iterations=1,
        l2_clip_norm=1.0,
        noise_multiplier=1e-3,
        truncated_batch_size=4,
        method="book_keeping",
        arithmetic=reference.FLOAT_SUMS["book_keeping"],
    )
    trainer = dpmp.DPTrainer(
        mechanism=mechanism,
        loss_fn=task.loss_fn,
        optimizer=optax.sgd(1.0),
        policy=dpmp.Policy.from_name("mixed_bfloat16"),
    )
    state = trainer.init(task.params)
    with _warning_of_float32_in(name):
        state = trainer.train_step(state, task.batch, np.zeros(4, bool))
    for before, after in zip(
        jax.tree.leaves(task.params), jax.tree.leaves(state.params), strict=True
    ):
        assert after.dtype == jnp.float32
        assert np.all(np.isfinite(after))
        assert np.any(np.asarray(before) != np.asarray(after))


@every_model
def test_no_fallback_costs_more_than_a_hundredth(name):
    task = framework_models.make(name)
    summary = dpmp.book_keeping.summarize(task.loss_fn, task.params, task.batch)
    for row in summary.rows:
        if "identity" in row.rules:
            assert row.share <= 0.01, row
