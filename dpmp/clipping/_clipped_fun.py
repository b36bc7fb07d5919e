"""Clips the output of a function for each example, or one pytree."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpmp import _validate
from dpmp._arrays import as_device_dtypes, as_mask, without_debugging
from dpmp._typing import PyTree
from dpmp.clipping import _clip_norms
from dpmp.clipping._callables import BoundedSensitivityCallable, make_callable
from dpmp.clipping._clip_norms import ClipNorms
from dpmp.clipping._clipped_sum import ClippedSum, keep_mask
from dpmp.clipping._shards import Shards
from dpmp.engines import (
    Signature,
    check_float_leaves,
    mappable,
    stack_engine,
    store_one,
)
from dpmp.numerics import Arithmetic, parse_arithmetic


def clipped_fun(
    fun: Callable[..., Any],
    has_aux: bool = False,
    *,
    batch_argnums: int | Sequence[int] = 0,
    keep_batch_dim: bool = True,
    l2_clip_norm: Any,
    rescale_to_unit_norm: bool = False,
    normalize_by: float = 1.0,
    return_norms: bool = False,
    microbatch_size: int | None = None,
    nan_safe: bool = True,
    dtype: Any = None,
    prng_argnum: int | None = None,
    spmd_axis_name: str | Sequence[str] | Shards | None = None,
    arithmetic: str | Arithmetic | None = None,
) -> BoundedSensitivityCallable:
    """Makes a function that sums the clipped per-example outputs of `fun`.

    Each example is given to `fun`, and its output is scaled down to a norm of at most
    `l2_clip_norm` before the outputs are added up. `clipped_grad` does the same with
    the gradient of `fun`.

    >>> clipped_sum = clipped_fun(jnp.sum, l2_clip_norm=1.0)
    >>> print(f"{clipped_sum(jnp.array([0.0, 0.25, -0.5, 10.0])):.4f}")
    0.7422

    Guarantees:
      See `clipped_grad`: the same guarantees hold, with the output of `fun` in place of
      a gradient.

    Args:
      fun: returns a tree of float arrays, or (tree, aux) if `has_aux`.
      has_aux: whether `fun` returns a pair.
      batch_argnums: the positions of the arguments that have a leading example axis.
      keep_batch_dim: see `clipped_grad`.
      l2_clip_norm: see `clipped_grad`.
      rescale_to_unit_norm: see `clipped_grad`.
      normalize_by: see `clipped_grad`.
      return_norms: whether to return the norms before clipping, (B,). They are
        sensitive.
      microbatch_size: see `clipped_grad`.
      nan_safe: see `clipped_grad`.
      dtype: see `clipped_grad`.
      prng_argnum: see `clipped_grad`.
      spmd_axis_name: see `clipped_grad`.
      arithmetic: see `clipped_grad`.

    Returns:
      A callable with the arguments of `fun` and `is_padding_example`. It returns the
      sum; or (sum, aux) if `has_aux`, (sum, norms) if `return_norms`, and
      (sum, (aux, norms)) with both.

    Raises:
      ValueError: see `clipped_grad`.
    """
    _validate.function(fun=fun)
    _validate.booleans(
        has_aux=has_aux,
        keep_batch_dim=keep_batch_dim,
        return_norms=return_norms,
        nan_safe=nan_safe,
    )
    sums = parse_arithmetic(arithmetic, dtype=dtype)
    signature = Signature.parse(
        batch_argnums=batch_argnums,
        prng_argnum=prng_argnum,
        keep_batch_dim=keep_batch_dim,
        has_aux=has_aux,
    )
    clip_norms = ClipNorms.from_tree(l2_clip_norm, rescale_to_unit_norm, normalize_by)

    def check(value):
        check_float_leaves(value, "the output of fun")
        clip_norms.check_prefix_of(value)

    value_fn = mappable(signature.of_one_example(fun, check), signature)

    def for_one_example(*args, **kwargs):
        value, aux = value_fn(*args, **kwargs)
        return value, (None, aux)

    def select(total, outputs):
        if has_aux and return_norms:
            return total, (outputs.aux, outputs.grad_norms)
        if has_aux or return_norms:
            return total, outputs.aux if has_aux else outputs.grad_norms
        return total

    clipped_sum = ClippedSum(
        engine=stack_engine(for_one_example, signature),
        signature=signature,
        clip_norms=clip_norms,
        arithmetic=clip_norms.fit(sums, nan_safe),
        microbatch_size=microbatch_size,
        nan_safe=nan_safe,
        shards=Shards.parse(spmd_axis_name),
    )
    return make_callable(
        clipped_sum,
        select,
        has_aux=has_aux or return_norms,
        has_params=False,
        l2_norm_bound=clipped_sum.l2_norm_bound,
    )


def clip_pytree(
    pytree: PyTree,
    clip_norm: Any,
    rescale_to_unit_norm: bool = False,
    nan_safe: bool = True,
    return_zero: bool | jax.Array = False,
) -> tuple[PyTree, jax.Array]:
    """Scales a pytree down to an L2 norm of at most `clip_norm`.

    >>> clipped, norm = clip_pytree({"w": jnp.array([3.0, 4.0])}, 1.0)
    >>> print(norm, clipped["w"])
    5.0 [0.59999967 0.7999996 ]

    Guarantees:
      The norm of the computed output is at most `clip_norm`, or at most 1 with
      `rescale_to_unit_norm`. This does not hold under `jax.vmap`; for batches, use
      `clipped_fun`. Edge cases:

      | case                       | rescale_to_unit_norm | output               |
      | :------------------------- | :------------------- | :------------------- |
      | clip_norm 0                | False                | an error             |
      | clip_norm 0                | True                 | the input / its norm |
      | clip_norm infinite         | False                | the input            |
      | clip_norm infinite         | True                 | an error             |
      | the norm is 0              | either               | zero                 |
      | infinity or NaN in the input or its norm | either | zero, if `nan_safe`  |

    Args:
      pytree: float arrays of any shapes.
      clip_norm: a number, a tree of numbers that is a prefix of `pytree`, or an
        `AutomaticClipping`. Each number clips its own part of `pytree`. With automatic
        clipping, the norm of the output is at most 1.
      rescale_to_unit_norm: whether to divide the output by `clip_norm`, or by the norm
        of all clip norms if there are several.
      nan_safe: whether to return zero if the input or its norm is not finite. Without
        it, NaN goes through and the guarantee is void for such input.
      return_zero: whether to return zero whatever the input; it may be an array.

    Returns:
      A pair of the clipped tree and the norm of the input, which is sensitive. The
      clipped tree is float32 or wider, because rounding to a narrower dtype could raise
      its norm above the bound.

    Raises:
      ValueError: if `clipped_grad` would refuse the clip norm, if the clip norm is not
        a prefix of `pytree`, or if a leaf is not a float array.
    """
    clip_norms = ClipNorms.from_tree(clip_norm, rescale_to_unit_norm, 1.0)
    check_float_leaves(pytree, "pytree")
    pytree = as_device_dtypes(pytree)
    clip_norms.check_prefix_of(pytree)
    return_zero = jnp.asarray(as_mask(return_zero=return_zero))
    if return_zero.shape != () or return_zero.dtype != jnp.dtype("bool"):
        _validate.fail(
            "return_zero must be one bool. For a batch, use clipped_fun and "
            "is_padding_example.",
            shape=return_zero.shape,
            dtype=return_zero.dtype.name,
        )
    targets, stability = clip_norms.targets, clip_norms.stability
    with without_debugging():
        grads = store_one(pytree)
        norms = grads.squared_norms(clip_norms.prefix)
        norm = _clip_norms.global_norm(norms)
        coefs = _clip_norms.coefficients(targets, norms, stability)
        clipped = grads.weighted_sum(
            coefs,
            keep_mask(norm, coefs, return_zero[None], nan_safe),
            clip_norms.prefix,
            parse_arithmetic(None, dtype=norm.dtype),
        )
        return clipped, norm[0]
