"""DP-SGD after everything was cast to bfloat16: what not to do, to compare with.

Parameters, optimizer state, gradients, norms, coefficients, running sums and noise are
all bfloat16. Nothing here has a privacy guarantee.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpmp


def make_trainer(
    mechanism: dpmp.DPSGD,
    loss_fn: Callable[[Any, Any], jax.Array],
    optimizer: optax.GradientTransformation,
) -> Callable[[Any, Any, int], tuple[Any, Any]]:
    """A function of (params, data, seed) that gives parameters and optimizer state.

    Args:
      mechanism: gives the sampling, the clip norm and the noise multiplier.
      loss_fn: (params, batch) -> the mean loss of the batch.
      optimizer: of bfloat16 gradients and parameters.
    """

    def clipped_grad(params, example):
        grads = jax.grad(loss_fn)(params, jax.tree.map(lambda x: x[None], example))
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        coef = jnp.minimum(1, mechanism.l2_clip_norm / norm)
        return jax.tree.map(lambda g: g * coef, grads)

    def sum_of_clipped_grads(params, batch, keep):
        """The running sum over microbatches."""

        def add(total, microbatch):
            examples, keep = microbatch
            clipped = jax.vmap(clipped_grad, (None, 0))(params, examples)

            def add_kept(total, x):
                mask = keep.reshape(-1, *[1] * (x.ndim - 1))
                return total + jnp.sum(jnp.where(mask, x, 0), axis=0)

            return jax.tree.map(add_kept, total, clipped), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(add, zeros, (batch, keep))[0]

    @jax.jit
    def step(params, opt_state, batch, keep, key):
        total = sum_of_clipped_grads(params, batch, keep)
        if mechanism.is_private:
            total = _add_noise(total, key, mechanism)
        grads = jax.tree.map(lambda x: x / mechanism.expected_batch_size, total)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def train(params, data, seed):
        params, data = _to_bfloat16(params), _to_bfloat16(data)
        opt_state = optimizer.init(params)
        for i in range(mechanism.iterations):
            indices, keep = _draw(mechanism, i, seed)
            batch = jax.tree.map(lambda x, at=indices: x[at], data)
            key = jax.random.fold_in(jax.random.key(seed), i)
            params, opt_state = step(params, opt_state, batch, keep, key)
        return params, opt_state

    return train


def _draw(mechanism: dpmp.DPSGD, step: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A batch in microbatches, and which of its examples are no padding."""
    num_examples, size = mechanism.num_examples, mechanism.padded_batch_size
    indices = mechanism.sampling.indices(step, num_examples=num_examples, key=seed)
    shape = (-1, mechanism.microbatch_size or size)
    keep = np.arange(size) < len(indices)
    padded = np.pad(indices, (0, size - len(indices)))
    return padded.reshape(shape), keep.reshape(shape)


def _to_bfloat16(tree: Any) -> Any:
    """Casts the float arrays of a tree."""
    return jax.tree.map(
        lambda x: jnp.asarray(x, jnp.bfloat16) if x.dtype == np.float32 else x, tree
    )


def _add_noise(total: Any, key: jax.Array, mechanism: dpmp.DPSGD) -> Any:
    """Normals as `jax.random` gives them."""
    assert mechanism.noise_multiplier is not None
    stddev = mechanism.noise_multiplier * mechanism.l2_clip_norm
    leaves, treedef = jax.tree.flatten(total)
    keys = jax.random.split(key, len(leaves))
    noisy = [
        x + stddev * jax.random.normal(key, x.shape, x.dtype)
        for x, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(treedef, noisy)
