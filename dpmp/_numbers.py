"""Numbers as users write them, turned into the Python numbers of the same value.

NumPy and jax scalars carry a dtype, and arithmetic with them happens in that dtype: a
product of two int32 overflows, and 1e-15 is zero beside a float16. So no scalar of
theirs gets past the functions and dataclasses that users call.
"""

import math
import numbers
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np


def as_number(value: Any) -> Any:
    """An integer as `int`, another real number as `float`; all else unchanged.

    Scalars of NumPy and jax are numbers, and so are their arrays without axes. Truth
    values are none, nor are values that jax traces.
    """
    if isinstance(value, bool | jax.core.Tracer):
        return value
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        return _from_array(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    return _to_float(value) if isinstance(value, numbers.Real) else value


def as_real(value: Any) -> Any:
    """As `as_number`, with integers as `float` too."""
    value = as_number(value)
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return _to_float(value) if is_integer else value


def _from_array(value: Any) -> Any:
    if value.shape != ():
        return value
    if jnp.issubdtype(value.dtype, jnp.integer):
        return int(value)
    is_float = jnp.issubdtype(value.dtype, jnp.floating)
    return _to_float(value[()]) if is_float else value


def _to_float(value: Any) -> float:
    """NaN, which is refused everywhere, for what floats have no number for."""
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return math.nan if math.isinf(number) and number != value else number
