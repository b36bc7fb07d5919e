"""Gradients of the mean loss as fast as they can be had, to compare private ones with.

The gradient as people write it (`jax.grad`) is not always the fastest: XLA's compiler
for CPUs is slow at products with a bfloat16 result, and small microbatches fit caches.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpmp import book_keeping
from dpmp.engines._signature import Signature, check_loss
from dpmp.engines.book_keeping import _linalg
from dpmp.numerics._arithmetic import parse

GradFn = Callable[[Any, Any], Any]


def grad_fns(loss_fn: Callable[..., jax.Array]) -> dict[str, GradFn]:
    """Functions of (params, batch), by name; the fastest depends on model and device.

    Args:
      loss_fn: (params, batch) -> the mean loss of the batch.
    """
    fast = _linalg.adapted(jax.grad(loss_fn))
    return {
        "without privacy": fast,
        "without privacy, 8": in_microbatches(fast, 8),
        "without privacy, book-kept": _unclipped(loss_fn),
    }


def in_microbatches(grad_fn: GradFn, size: int) -> GradFn:
    """The mean of the gradients of parts of a batch, summed in float32."""

    def grad_of_all(params: Any, batch: Any) -> Any:
        parts = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), batch)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)

        def step(total: Any, part: Any) -> Any:
            grad = grad_fn(params, part)
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, grad), None

        total, _ = jax.lax.scan(step, zeros, parts)
        return jax.tree.map(
            lambda x: x * (size / len(jax.tree.leaves(batch)[0])), total
        )

    return grad_of_all


def _unclipped(loss_fn: Callable[..., jax.Array]) -> GradFn:
    """The mean gradient, by the sums of book-keeping."""
    signature = Signature.parse(argnums=0, batch_argnums=1)
    loss_of_one = signature.of_one_example(loss_fn, check_loss)
    engine = book_keeping.Engine(loss_of_one, signature, is_bounded=False)

    def grad_fn(params: Any, batch: Any) -> Any:
        size = len(jax.tree.leaves(batch)[0])
        coefs, keep = jnp.full(size, 1 / size), jnp.full(size, True)
        one_group = jax.tree.structure(0)
        return engine(params, batch).weighted_sum([coefs], keep, one_group, parse(None))

    return grad_fn
