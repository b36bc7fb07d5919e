"""DP-SGD after everything was cast to bfloat16: what not to do, to compare with.

Parameters, optimizer state, gradients, norms, coefficients, running sums and noise are
all bfloat16. Nothing here has a privacy guarantee.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpmp


def train(
    mechanism: dpmp.DPSGD,
    loss_fn: Callable[[Any, Any], jax.Array],
    optimizer: optax.GradientTransformation,
    params: Any,
    data: Any,
    seed: int,
) -> tuple[Any, Any]:
    """Parameters and optimizer state after training, both in bfloat16.

    The mechanism gives the sampling, the clip norm and the noise multiplier. The seed
    decides on batches and noise.
    """
    size, num_examples = mechanism.padded_batch_size, mechanism.num_examples
    # Without privacy, there is neither noise nor a clip norm.
    noise_multiplier = mechanism.noise_multiplier or 0.0
    stddev = noise_multiplier * mechanism.l2_clip_norm if mechanism.is_private else 0.0
    shape = (-1, mechanism.microbatch_size or size)

    def clipped_grad(params, example):
        grads = jax.grad(loss_fn)(params, jax.tree.map(lambda x: x[None], example))
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        coef = jnp.minimum(1, mechanism.l2_clip_norm / norm)
        return jax.tree.map(lambda g: g * coef, grads)

    def add(params, total, microbatch):
        """The running sum over microbatches."""
        examples, keep = microbatch
        clipped = jax.vmap(clipped_grad, (None, 0))(params, examples)

        def add_kept(total, x):
            mask = keep.reshape(-1, *[1] * (x.ndim - 1))
            return total + jnp.sum(jnp.where(mask, x, 0), axis=0)

        return jax.tree.map(add_kept, total, clipped), None

    @jax.jit
    def step(params, opt_state, batch, keep, key):
        zeros = jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(functools.partial(add, params), zeros, (batch, keep))
        keys = optax.tree.split_key_like(key, total)
        noisy_mean = jax.tree.map(
            lambda x, key: (
                (x + stddev * jax.random.normal(key, x.shape, x.dtype))
                / mechanism.expected_batch_size
            ),
            total,
            keys,
        )
        updates, opt_state = optimizer.update(noisy_mean, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params, data = _to_bfloat16(params), _to_bfloat16(data)
    opt_state = optimizer.init(params)
    draw = mechanism.batch_selection_strategy.drawer(num_examples)
    for i in range(mechanism.iterations):
        chosen = draw(i, seed)
        keep = (np.arange(size) < len(chosen)).reshape(shape)
        indices = np.pad(chosen, (0, size - len(chosen))).reshape(shape)
        batch = jax.tree.map(lambda x, at=indices: x[at], data)
        key = jax.random.fold_in(jax.random.key(seed), i)
        params, opt_state = step(params, opt_state, batch, keep, key)
    return params, opt_state


def _to_bfloat16(tree: Any) -> Any:
    """Casts the float arrays of a tree."""
    return jax.tree.map(
        lambda x: jnp.asarray(x, jnp.bfloat16) if x.dtype == np.float32 else x, tree
    )
