"""Convolutions in the one layout that XLA's CPU compiler computes fast in any place.

In this layout, the channels come last: (batch, *space, channels) for the input and the
output, and (*space, input channels, output channels) for the kernel. The compiler
changes other layouts to this one, but not inside of loops and branches. There, a
convolution in another layout takes up to 60 times as long (jax 0.10).
"""

import math
from typing import Any

import jax
import numpy as np

from dpmp.programs import primitives
from dpmp.programs.interpreter import bind

# A convolution in many groups, each of few products, is faster as it is.
_FEW_PRODUCTS = 64


def _with_channels_last(eqn: Any, values: list[Any]) -> list[Any] | None:
    """Evaluates a convolution in the fast layout on CPUs; None if it is in it."""
    given = eqn.params["dimension_numbers"]
    last = len(given.lhs_spec) - 1
    space = range(1, last)
    fast = type(given)(
        (0, last, *space), (last, last - 1, *range(last - 1)), (0, last, *space)
    )
    shape = eqn.invars[1].aval.shape
    products = math.prod(shape[i] for i in given.rhs_spec[1:])
    is_small = eqn.params["feature_group_count"] > 1 and products <= _FEW_PRODUCTS
    if given == fast or is_small:
        return None
    batch, channels, *rest = given.lhs_spec
    outputs, inputs, *window = given.rhs_spec
    made, features, *places = given.out_spec

    def in_fast_layout(x: jax.Array, kernel: jax.Array) -> jax.Array:
        x = x.transpose(batch, *rest, channels)
        kernel = kernel.transpose(*window, inputs, outputs)
        (result,) = bind(eqn, [x, kernel], dimension_numbers=fast)
        return result.transpose(np.argsort([made, *places, features]).tolist())

    def as_written(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return bind(eqn, [x, kernel])[0]

    return [jax.lax.platform_dependent(*values, cpu=in_fast_layout, default=as_written)]


RULES = {primitives.CONVOLUTION: _with_channels_last}
