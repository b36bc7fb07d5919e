"""The vmap engine: it holds a stack of per-example gradients in the model's dtype."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from dpmp._fence import materialize
from dpmp._typing import PyTree
from dpmp.engines._signature import Signature
from dpmp.numerics import (
    Arithmetic,
    GradientSums,
    SquaredNorm,
    StoredArray,
    compute_and_store,
    floats_of,
    indices_of_block,
    packing,
    reduction,
    rows_of_block,
    squared_norm,
)
from dpmp.programs import analysis, primitives
from dpmp.programs.interpreter import rewrite
from dpmp.programs.transformations import FAST_CONVOLUTIONS, without_ragged_products

# Arrays of at most this many entries are joined.
_FEW = 512


@dataclass(frozen=True)
class StackedGrads:
    """`PerExampleGrads` as arrays with a leading example axis.

    `stack` is the tree to clip. Its leaves are `StoredArray`s of shape (B, ...).
    """

    values: jax.Array | None
    aux: PyTree
    stack: PyTree

    def squared_norms(self, prefix: Any) -> list[SquaredNorm]:
        """See `PerExampleGrads`."""
        return [squared_norm(group.arrays) for group in self._groups(prefix)]

    def weighted_sum(
        self,
        clip_coefs: list[jax.Array],
        keep: jax.Array,
        prefix: Any,
        arithmetic: Arithmetic,
    ) -> PyTree:
        """See `PerExampleGrads`."""
        sums_of = cast("GradientSums", arithmetic)  # enforced by `parse`
        groups = self._groups(prefix)
        # The norm check and the sum must read the same bits.
        coefs, keep = materialize(lambda: (clip_coefs, keep), (clip_coefs, keep))
        counted = [
            sums_of.passes_norm_check(group.arrays, coef, keep, i)
            for i, (group, coef) in enumerate(zip(groups, coefs, strict=True))
        ]
        # A mask has all bits set for an example that contributes, and none otherwise.
        masks = materialize(lambda: [-x.astype(jnp.int32) for x in counted], counted)
        (batch_size,) = keep.shape
        size = reduction.block_size(batch_size)

        def add_blocks(i: Any) -> list[PyTree]:
            sums, indices = [], indices_of_block(i, batch_size // size, size)
            for group, coef, mask in zip(groups, coefs, masks, strict=True):
                rows = [rows_of_block(x, indices) for x in (coef, mask)]
                sums += [
                    _add_block(x.bits, *rows, indices, x.dtype, sums_of)
                    for x in group.arrays
                ]
            return sums

        totals = reduction.sum_examples(add_blocks, batch_size // size)
        sums = iter(totals)
        return prefix.unflatten(
            group.unpack([next(sums) for _ in group.arrays]) for group in groups
        )

    def _groups(self, prefix: Any) -> list["_Group"]:
        return [_Group.of(tree) for tree in prefix.flatten_up_to(self.stack)]


# A jitted function: the program has one copy for all arrays of one shape.
@functools.partial(jax.jit, static_argnames=("dtype", "arithmetic"))
def _add_block(
    bits: jax.Array,
    coefs: list[jax.Array],
    masks: list[jax.Array],
    indices: list[jax.Array],
    dtype: Any,
    arithmetic: GradientSums,
) -> PyTree:
    """Sums the contributions of a block of examples, for one array."""

    @jax.jit  # one copy for all rows
    def term(row: jax.Array, coef: jax.Array, mask: jax.Array) -> jax.Array:
        zero = ~mask  # zero for every example that contributes
        return _select(arithmetic.contribution(floats_of(row, dtype), coef, zero), mask)

    rows = rows_of_block(bits, indices)
    return arithmetic.add_block(list(map(term, rows, coefs, masks)))


def _select(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Replaces numbers whose mask is zero by zero, even if they are infinite or NaN.

    It masks the bits of the finished product with an integer that the compiler does not
    know. So the compiler cannot contract the product into a following addition (FMA):
    each contribution is rounded before it is added, whatever the compiler fuses.
    """
    integer = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, integer) & mask.astype(integer)
    return jax.lax.bitcast_convert_type(bits, x.dtype)


class _Group(NamedTuple):
    """The arrays of a clipping group, (B, n), with the small ones joined.

    `numbers` lists, for each array, the indices of the leaves that it consists of.
    """

    arrays: list[StoredArray]
    leaves: list[StoredArray]
    numbers: list[list[int]]
    treedef: Any

    @classmethod
    def of(cls, tree: PyTree) -> "_Group":
        leaves, treedef = jax.tree.flatten(tree)
        numbers = packing.groups_of(
            [x.bits.shape[1] for x in leaves], [x.dtype for x in leaves], few=_FEW
        )
        joined = packing.join([x.bits for x in leaves], numbers)
        arrays = [
            StoredArray(bits, leaves[some[0]].dtype, bits.shape[1:])
            for bits, some in zip(joined, numbers, strict=True)
        ]
        return cls(arrays, leaves, numbers, treedef)

    def unpack(self, sums: list[jax.Array]) -> PyTree:
        """Splits the sums of joined arrays into the sums of the leaves."""
        sizes = [x.bits.shape[1] for x in self.leaves]
        split = packing.split(sums, self.numbers, sizes)
        return self.treedef.unflatten(
            x.reshape(leaf.shape) for leaf, x in zip(self.leaves, split, strict=True)
        )


def store_one(tree: PyTree) -> StackedGrads:
    """Wraps a per-example gradient as a batch of one."""
    batch = functools.partial(jax.tree.map, lambda x: jnp.asarray(x)[None], tree)
    stack, _ = compute_and_store(lambda: (batch(), None), tree)
    return StackedGrads(None, None, stack)


def mappable(fun: Callable[..., PyTree], signature: Signature) -> Callable[..., PyTree]:
    """Returns `fun`, of one example, without products that `jax.vmap` cannot map.

    Make a function mappable before differentiating it.
    """
    arrays = (*signature.of_params, *signature.of_examples)

    def mapped(*args: Any, **kwargs: Any) -> PyTree:
        def of_arrays(*given: Any) -> PyTree:
            every = dict(enumerate(args)) | dict(zip(arrays, given, strict=True))
            return fun(*every.values(), **kwargs)

        given = [args[i] for i in arrays]
        # The function is traced once more, only to look for such products.
        jaxpr = jax.make_jaxpr(of_arrays)(*given).jaxpr
        if analysis.has_primitive(jaxpr, primitives.RAGGED_DOT):
            of_arrays = without_ragged_products(of_arrays)
        return of_arrays(*given)

    return mapped


def stack_engine(
    fun: Callable[..., tuple[PyTree, tuple[Any, PyTree]]], signature: Signature
) -> Callable[..., StackedGrads]:
    """Makes an engine that maps a mappable `fun` over a batch of examples.

    `fun` takes the arguments of one example and returns (tree to clip, (value, aux)).
    """

    def engine(*args: Any, **kwargs: Any) -> StackedGrads:
        of_examples = signature.of_examples
        in_axes = [0 if i in of_examples else None for i in range(len(args))]
        mapped = jax.vmap(functools.partial(fun, **kwargs), in_axes)
        compute = rewrite(lambda: mapped(*args), FAST_CONVOLUTIONS)
        stack, (values, aux) = compute_and_store(compute, (args, kwargs))
        return StackedGrads(values, aux, stack)

    return engine
