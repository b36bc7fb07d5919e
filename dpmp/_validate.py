"""Checks the arguments of public functions, and converts scalars to Python numbers.

NumPy and jax compute with scalars in the dtype of these scalars: a product of two int32
overflows, and 1e-15 becomes zero beside a float16. So the functions and dataclasses
that users call convert every such scalar first.
"""

import math
import numbers
from collections.abc import Callable, Collection
from typing import Any, NoReturn

import jax
import jax.core
import jax.numpy as jnp
import numpy as np


class RefusedError(ValueError):
    """Raised for an argument that dpmp refuses. The message says what to do.

    The command line shows it as an error of the user. Any other exception is a defect,
    and is shown with its traceback.
    """


def fail(
    required: str,
    *,
    fix: str | None = None,
    error: type[Exception] = RefusedError,
    **given: Any,
) -> NoReturn:
    """Raises `error` with the requirement, the given values and the fix.

    `required` may hold both sentences: "rank must be positive. Use 4 to 64." The given
    values are shown between them.
    """
    if fix is None:
        required, _, fix = required.partition(". ")
    values = ", ".join(f"{name}={value!r}" for name, value in given.items())
    got = f"; got {values}" if given else ""
    raise error(f"{required}{got}. {fix}")


def require(
    condition: bool,
    required: str,
    *,
    fix: str | None = None,
    error: type[Exception] = RefusedError,
    **given: Any,
) -> None:
    """Raises `error` unless `condition` holds; see `fail`."""
    if not condition:
        fail(required, fix=fix, error=error, **given)


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
    """Converts to `float`; out of range, the result is NaN, which checks refuse."""
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return math.nan if math.isinf(number) and number != value else number


def is_real(value: Any) -> bool:
    """Whether `value` is a Python or NumPy real number (no bool, no array, no NaN)."""
    is_number = isinstance(value, numbers.Real)
    return is_number and not isinstance(value, bool | np.bool) and not math.isnan(value)


def is_integer(value: Any) -> bool:
    """Whether `value` is a Python or NumPy integer (no bool)."""
    return is_real(value) and isinstance(value, numbers.Integral)


def is_scale(value: Any) -> bool:
    """Whether `value` is a power of two from 2^-40 to 2^40."""
    value = as_number(value)
    in_range = is_real(value) and 2.0**-40 <= value <= 2.0**40
    return in_range and math.frexp(value)[0] == 0.5


def positive_integer(*, fix: str = "Use 100, for example.", **value: Any) -> int:
    """Checks that the one keyword is an integer of at least 1; returns an `int`."""
    return _checked_integer(1, fix, value)


def nonnegative_integer(*, fix: str = "Use 0, for example.", **value: Any) -> int:
    """Checks that the one keyword is an integer of at least 0; returns an `int`."""
    return _checked_integer(0, fix, value)


def positive(*, fix: str = "Use 1.0, for example.", **value: Any) -> float:
    """Checks that the one keyword is finite and above 0; returns a `float`."""
    return _checked_real(
        lambda x: 0 < x < math.inf, "a finite number above 0", fix, value
    )


def nonnegative(*, fix: str = "Use 0.0, for example.", **value: Any) -> float:
    """Checks that the one keyword is finite and at least 0; returns a `float`."""
    return _checked_real(
        lambda x: 0 <= x < math.inf, "a finite number of at least 0", fix, value
    )


def probability(*, fix: str = "Use 0.01, for example.", **value: Any) -> float:
    """Checks that the one keyword is in (0, 1]; returns a `float`."""
    return _checked_real(lambda x: 0 < x <= 1, "in (0, 1]", fix, value)


def boolean(*, fix: str = "Use one of them.", **value: Any) -> bool:
    """Checks that the one keyword is a Python or NumPy bool; returns a `bool`."""
    ((name, given),) = value.items()
    is_bool = isinstance(given, bool | np.bool)
    require(is_bool, f"{name} must be True or False", fix=fix, **value)
    return bool(given)


def function(**value: Any) -> Callable[..., Any]:
    """Checks that the one keyword can be called; returns it."""
    ((name, given),) = value.items()
    require(
        callable(given),
        f"{name} must be a function. Pass the function itself.",
        type=type(given).__name__,
    )
    return given


def instance(classes: Any, fix: str, **value: Any) -> Any:
    """Checks that the one keyword is an instance of one of `classes`; returns it."""
    ((name, given),) = value.items()
    if not isinstance(given, classes):
        classes = classes if isinstance(classes, tuple) else (classes,)
        names = " or ".join(each.__name__ for each in classes)
        fail(f"{name} must be a {names}", fix=fix, type=type(given).__name__)
    return given


def one_of(names: Collection[Any], **value: Any) -> Any:
    """Checks that the one keyword is one of some names; returns it."""
    ((name, given),) = value.items()
    is_name = given is None or isinstance(given, str)
    require(
        is_name and given in names,
        f"{name} must be one of {list(names)}. Use one of these.",
        **value,
    )
    return given


def fields(instance: Any, **checks: Callable[..., Any]) -> None:
    """Replaces fields of a frozen dataclass by their checked values.

    `checks` has a function for each field, such as `positive`.
    """
    for name, check in checks.items():
        object.__setattr__(instance, name, check(**{name: getattr(instance, name)}))


def optional(check: Callable[..., Any]) -> Callable[..., Any]:
    """Extends a check so that it accepts None."""

    def check_unless_none(**value: Any) -> Any:
        (given,) = value.values()
        return None if given is None else check(**value)

    return check_unless_none


def _checked_integer(least: int, fix: str, value: dict[str, Any]) -> int:
    ((name, given),) = value.items()
    x = as_number(given)
    require(
        is_integer(x) and x >= least,
        f"{name} must be an integer of at least {least}",
        fix=fix,
        **value,
    )
    return x


def _checked_real(
    is_in_range: Callable[[float], bool], range_: str, fix: str, value: dict[str, Any]
) -> float:
    ((name, given),) = value.items()
    x = as_real(given)
    require(is_real(x) and is_in_range(x), f"{name} must be {range_}", fix=fix, **value)
    return x


def check_x64(dtype: Any, what: str) -> None:
    """Raises ValueError where jax would silently turn a float64 into a float32."""
    require(
        np.dtype(dtype) != np.float64 or jax.config.read("jax_enable_x64"),
        f"{what} need 64-bit mode",
        jax_enable_x64=False,
        fix='Call jax.config.update("jax_enable_x64", True) at start-up, or use '
        'float32 (for sums, arithmetic="exact" is better still).',
    )
