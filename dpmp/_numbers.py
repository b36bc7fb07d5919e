"""Converts the numbers that users pass into Python numbers of the same value.

NumPy and jax compute with scalars in the dtype of these scalars: a product of two int32
overflows, and 1e-15 becomes zero beside a float16. So the functions and dataclasses
that users call convert every such scalar first.
"""

import math
import numbers
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np


def as_number(value: Any) -> Any:
    """Converts an integer to `int` and any other real number to `float`.

    NumPy and jax scalars count as numbers, and so do their arrays without axes. A
    `bool` and a traced value do not count as numbers. They are returned unchanged, and
    so is everything else.
    """
    if isinstance(value, bool | jax.core.Tracer):
        return value
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        return _from_array(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    return _to_float(value) if isinstance(value, numbers.Real) else value


def as_real(value: Any) -> Any:
    """Converts any real number to `float`, integers included; see `as_number`."""
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
    """The value as a `float`; NaN, which every check refuses, if it is out of range."""
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return math.nan if math.isinf(number) and number != value else number
