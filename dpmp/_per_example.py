"""The vmap engine: holds the stack of per-example gradients in the model's dtype."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dpmp import _accumulation
from dpmp._accumulation import Accumulator
from dpmp._grid import Grid, certified_sum
from dpmp._stored import StoredArray, compute_and_store
from dpmp._typing import GradEngine, PyTree, SquaredNorm


@dataclass(frozen=True)
class StackedGrads:
    """`PerExampleGrads` over arrays with a leading example axis.

    Attributes:
      values: per-example losses, (B,), or None.
      aux: per-example auxiliary outputs, leaves (B, ...).
      stack: the tree to be clipped, its leaves `StoredArray` of shape (B, ...).
    """

    values: Any
    aux: PyTree
    stack: PyTree

    def squared_norms(self, prefix: Any) -> list[SquaredNorm]:
        """See `PerExampleGrads`."""
        groups = prefix.flatten_up_to(self.stack)
        return [_accumulation.squared_norm(jax.tree.leaves(group)) for group in groups]

    def weighted_sum(
        self,
        clip_coefs: list[jax.Array],
        keep: jax.Array,
        prefix: Any,
        accumulator: Accumulator | Grid,
    ) -> PyTree:
        """See `PerExampleGrads`."""
        groups = prefix.flatten_up_to(self.stack)
        sums = []
        for i, (group, coef) in enumerate(zip(groups, clip_coefs, strict=True)):
            if isinstance(accumulator, Grid):
                part = certified_sum(group, coef, keep, accumulator.radii[i])
            else:
                one = functools.partial(_weighted_sum, accumulator, coef, keep)
                part = jax.tree.map(one, group)
            sums.append(part)
        return jax.tree.unflatten(prefix, sums)


def _weighted_sum(
    accumulator: Accumulator, coef: jax.Array, keep: jax.Array, stack: StoredArray
) -> PyTree:
    """Sums coefficient times row over the rows that are kept, without a scaled copy."""

    def take(start: int, stop: int) -> PyTree:
        rows = stack.load(start, stop, axis=0)
        scaled = coef[start:stop, None].astype(rows.dtype) * rows
        # Selecting comes after the product: it keeps 0 * inf out of the sum, and the
        # product from being contracted into the addition, which would break the
        # error-free transformations of double-word sums.
        return accumulator.lift(jnp.where(keep[start:stop, None], scaled, 0))

    total = _accumulation.fold(take, stack.bits.shape[0], add=accumulator.add, axis=0)
    return jax.tree.map(lambda x: x.reshape(stack.shape), total)


def store_one(tree: PyTree) -> StackedGrads:
    """A batch of the one example whose gradient is given."""
    stack, _ = compute_and_store(
        lambda: (jax.tree.map(lambda x: jnp.asarray(x)[None], tree), None),
        tree,
    )
    return StackedGrads(None, None, stack)


def stack_engine(
    fun: Callable[..., tuple[PyTree, tuple[Any, PyTree]]],
    *,
    batch_argnums: Sequence[int],
    prng_argnum: int | None,
    spmd_axis_name: Any,
) -> GradEngine:
    """An engine that maps `fun` over the examples of a batch.

    Args:
      fun: from one example's arguments to (tree to be clipped, (value, aux)).
      batch_argnums: the positions of arguments with a leading example axis.
      prng_argnum: the position of an argument that holds one key per example.
      spmd_axis_name: as in `jax.vmap`.

    Returns:
      A function of the arguments of `fun`, batched, that gives `StackedGrads`.
    """
    mapped = {*batch_argnums, prng_argnum}

    def engine(*args: Any, **kwargs: Any) -> StackedGrads:
        in_axes = [0 if i in mapped else None for i in range(len(args))]

        def compute():
            return jax.vmap(
                functools.partial(fun, **kwargs),
                in_axes=in_axes,
                spmd_axis_name=spmd_axis_name,
            )(*args)

        stack, (values, aux) = compute_and_store(compute, (args, kwargs))
        return StackedGrads(values, aux, stack)

    return engine
