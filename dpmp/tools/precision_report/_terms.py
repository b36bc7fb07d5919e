"""Which dtypes are narrow, and what sums of how many terms lose in them."""

import math
from typing import Any

import jax.numpy as jnp

# What is lost of a sum of n terms is at most n times half of the dtype's epsilon of
# it, and the root of n / 3 of these, typically, if every addition is rounded.
_NOTICEABLE = 1 / 8


def is_narrow(dtype: Any) -> bool:
    """Whether a dtype is a float of 16 bits or fewer."""
    return is_float(dtype) and dtype.itemsize <= 2


def is_wide(dtype: Any) -> bool:
    """Whether a dtype is a float of more."""
    return is_float(dtype) and dtype.itemsize > 2


def is_float(dtype: Any) -> bool:
    """Whether a dtype is a real float; None is none."""
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def is_noticeable(length: int, dtype: Any) -> bool:
    """Whether rounding may change a sum in a dtype by a good part of it."""
    return is_narrow(dtype) and rounding_bound(length, dtype) >= _NOTICEABLE


def rounding_bound(length: int, dtype: Any) -> float:
    """What may be lost of a sum of positive terms, relative to it."""
    return length * float(jnp.finfo(dtype).eps) / 2


def num_terms(eqn: Any) -> int:
    """How many numbers are added up for an entry of the result."""
    name, params, shape = eqn.primitive.name, eqn.params, eqn.invars[0].aval.shape
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return math.prod(shape[i] for i in contracted)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        return math.prod(kernel) // kernel[params["dimension_numbers"].rhs_spec[0]]
    if name.startswith("ragged_dot"):
        return shape[-1]
    if name == "cumsum":
        return shape[params["axis"]]
    if name == "reduce_window_sum":
        return math.prod(params["window_dimensions"])
    return math.prod(shape) // max(1, math.prod(eqn.outvars[0].aval.shape))


def num_updates(eqn: Any) -> int:
    """How many numbers a scatter may add to an entry."""
    if eqn.params["unique_indices"]:
        return 1
    shape = eqn.invars[1].aval.shape
    batched = eqn.params["dimension_numbers"].scatter_indices_batching_dims
    return math.prod(n for i, n in enumerate(shape[:-1]) if i not in batched)
