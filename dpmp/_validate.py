"""Error messages in three parts: what is required, what was given, what to do."""

import math
import numbers
from typing import Any, NoReturn

import jax
import numpy as np


def fail(
    required: str, *, fix: str, error: type[Exception] = ValueError, **given: Any
) -> NoReturn:
    """Raises `error`, naming what is required, the given values, and the way out."""
    values = ", ".join(f"{name}={value!r}" for name, value in given.items())
    raise error(f"{required}; got {values}. {fix}")


def require(
    condition: bool,
    required: str,
    *,
    fix: str,
    error: type[Exception] = ValueError,
    **given: Any,
) -> None:
    """Fails unless `condition` holds."""
    if not condition:
        fail(required, fix=fix, error=error, **given)


def is_real(value: Any) -> bool:
    """Whether `value` is a Python or NumPy real number (no bool, no array, no NaN)."""
    is_number = isinstance(value, numbers.Real)
    return is_number and not isinstance(value, bool | np.bool) and not math.isnan(value)


def is_integer(value: Any) -> bool:
    """Whether `value` is an integral Python or NumPy number."""
    return is_real(value) and isinstance(value, numbers.Integral)


def is_scale(value: Any) -> bool:
    """Whether `value` is a power of two, from 2^-40 to 2^40."""
    in_range = is_real(value) and 2.0**-40 <= value <= 2.0**40
    return in_range and math.frexp(value)[0] == 0.5


def positive_integer(*, fix: str, **value: Any) -> None:
    """Requires the one keyword value to be an integer of at least 1."""
    ((name, given),) = value.items()
    require(
        is_integer(given) and given >= 1,
        f"{name} must be an integer of at least 1",
        fix=fix,
        **value,
    )


def positive(*, fix: str, **value: Any) -> None:
    """Requires the one keyword value to be a finite real number above 0."""
    ((name, given),) = value.items()
    require(
        is_real(given) and 0 < given < math.inf,
        f"{name} must be a finite number above 0",
        fix=fix,
        **value,
    )


def nonnegative(*, fix: str, **value: Any) -> None:
    """Requires the one keyword value to be a finite real number of at least 0."""
    ((name, given),) = value.items()
    require(
        is_real(given) and 0 <= given < math.inf,
        f"{name} must be a finite number of at least 0",
        fix=fix,
        **value,
    )


def probability(*, fix: str, **value: Any) -> None:
    """Requires the one keyword value to be a real number in (0, 1]."""
    ((name, given),) = value.items()
    require(
        is_real(given) and 0 < given <= 1,
        f"{name} must be in (0, 1]",
        fix=fix,
        **value,
    )


def check_x64(dtype: Any, what: str) -> None:
    """Raises ValueError where jax would silently turn a float64 into a float32."""
    require(
        np.dtype(dtype) != np.float64 or jax.config.read("jax_enable_x64"),
        f"{what} need 64-bit mode",
        jax_enable_x64=False,
        fix='Call jax.config.update("jax_enable_x64", True) at start-up, or use '
        'float32 (for sums, accumulator="float32x2" is as good).',
    )
