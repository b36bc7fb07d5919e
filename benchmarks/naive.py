"""DP-SGD after everything was cast to bfloat16: what not to do, to compare with.

Parameters, optimizer state, gradients, norms, coefficients, running sums and noise are
all bfloat16. Nothing here has a privacy guarantee.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpmp


@dataclass(frozen=True, kw_only=True)
class NaiveTrainer:
    """Trains in bfloat16, on batches of the sizes that `mechanism` has.

    Attributes:
      mechanism: gives the sampling, the clip norm and the noise multiplier.
      loss_fn: (params, batch) -> the mean loss of the batch.
      optimizer: of bfloat16 gradients and parameters.
    """

    mechanism: dpmp.DPSGD
    loss_fn: Callable[[Any, Any], jax.Array]
    optimizer: optax.GradientTransformation

    def fit(self, params: Any, data: Any, *, seed: int) -> tuple[Any, Any]:
        """Parameters and optimizer state after all steps."""
        params, data = _to_bfloat16(params), _to_bfloat16(data)
        opt_state = self.optimizer.init(params)
        for i in range(self.mechanism.iterations):
            batch, keep = self._load_batch(data, i, seed)
            key = jax.random.fold_in(jax.random.key(seed), i)
            params, opt_state = self._step(params, opt_state, batch, keep, key)
        return params, opt_state

    def _load_batch(self, data: Any, step: int, seed: int) -> tuple[Any, np.ndarray]:
        """A batch in microbatches, and which of its examples are no padding."""
        mechanism = self.mechanism
        indices = mechanism.sampling.indices(
            step, num_examples=mechanism.num_examples, key=seed
        )
        shape = (-1, mechanism.microbatch_size or mechanism.padded_batch_size)
        keep = np.arange(mechanism.padded_batch_size) < len(indices)
        padded = np.pad(indices, (0, len(keep) - len(indices))).reshape(shape)
        return jax.tree.map(lambda x: x[padded], data), keep.reshape(shape)

    @functools.cached_property
    def _step(self) -> Callable[..., tuple[Any, Any]]:
        mechanism = self.mechanism

        def step(params, opt_state, batch, keep, key):
            total = self._sum_of_clipped_grads(params, batch, keep)
            if mechanism.is_private:
                total = _add_noise(total, key, mechanism)
            grads = jax.tree.map(lambda x: x / mechanism.expected_batch_size, total)
            updates, opt_state = self.optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        return jax.jit(step)

    def _sum_of_clipped_grads(self, params: Any, batch: Any, keep: jax.Array) -> Any:
        """The running sum over microbatches."""

        def clipped_grad(example):
            example = jax.tree.map(lambda x: x[None], example)
            grads = jax.grad(self.loss_fn)(params, example)
            norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
            coef = jnp.minimum(1, self.mechanism.l2_clip_norm / norm)
            return jax.tree.map(lambda g: g * coef, grads)

        def add(total, microbatch):
            examples, keep = microbatch
            clipped = jax.vmap(clipped_grad)(examples)

            def add_kept(total, x):
                mask = keep.reshape(-1, *[1] * (x.ndim - 1))
                return total + jnp.sum(jnp.where(mask, x, 0), axis=0)

            return jax.tree.map(add_kept, total, clipped), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(add, zeros, (batch, keep))[0]


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
