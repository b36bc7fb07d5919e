"""Clips one pytree to a largest norm."""

from typing import Any

import jax
import jax.numpy as jnp

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.clipping import _clip_norms, _clipped_sum
from dpmp.clipping._clip_norms import ClipNorms
from dpmp.engines import check_float_leaves, store_one
from dpmp.numerics import parse_arithmetic


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
    clip_norms.check_prefix_of(pytree)
    return_zero = jnp.asarray(return_zero)
    _validate.require(
        return_zero.shape == () and return_zero.dtype == jnp.dtype("bool"),
        "return_zero must be one bool",
        shape=return_zero.shape,
        dtype=return_zero.dtype.name,
        fix="For a batch, use clipped_fun and is_padding_example.",
    )
    grads = store_one(pytree)
    norms = grads.squared_norms(clip_norms.prefix)
    norm = _clip_norms.global_norm(norms)
    coefs = _clip_norms.coefficients(clip_norms.targets, norms, clip_norms.stability)
    clipped = grads.weighted_sum(
        coefs,
        _clipped_sum.keep_mask(norm, coefs, return_zero[None], nan_safe),
        clip_norms.prefix,
        parse_arithmetic(None, dtype=norm.dtype),
    )
    return clipped, norm[0]
