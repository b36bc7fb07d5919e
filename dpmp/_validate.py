"""Checks the arguments of public functions, and converts scalars to Python numbers.

NumPy and jax compute with scalars in the dtype of these scalars: a product of two int32
overflows, and 1e-15 becomes zero beside a float16. So the functions and dataclasses
that users call convert every such scalar first.
"""

import contextlib
import inspect
import math
import numbers
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

_Number = TypeVar("_Number", int, float)

_LONGEST = 400  # characters of a value in a message


class RefusedError(ValueError):
    """Raised for an argument that dpmp refuses. The message says what to do.

    The command line shows it without a traceback. Any other exception is a defect.
    """


def fail(
    required: str,
    *,
    fix: str | None = None,
    error: type[Exception] = RefusedError,
    **given: Any,
) -> NoReturn:
    """Raises `error` with the requirement, the given values and the fix.

    `required` may hold both: "rank must be positive. Use 4 to 64." The given values are
    shown between the two sentences.
    """
    if fix is None:
        required, _, fix = required.partition(". ")
    values = ", ".join(f"{name}={_shown(value)}" for name, value in given.items())
    got = f"; got {values}" if given else ""
    raise error(f"{required}{got}. {fix}")


def _shown(value: Any) -> str:
    """A value for a message; only its kind if it may be private: arrays, long lists."""
    kind = f"a {type(value).__module__}.{type(value).__qualname__}"
    try:
        leaves = jax.tree.leaves(value)
    except (TypeError, ValueError):  # for a dict whose keys cannot be sorted
        return kind
    if any(getattr(x, "shape", None) for x in leaves):
        shape, dtype = (getattr(value, x, None) for x in ("shape", "dtype"))
        return f"{kind} of shape {shape}, {dtype}" if shape else f"{kind} of arrays"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{kind} that is too long to show"


def as_number(value: Any) -> Any:
    """Converts an integer to `int` and any other real number to `float`.

    Arrays without axes count as numbers, but a `bool` and a traced value do not.
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


def _check(
    kind: type[_Number], is_in_range: Callable[[Any], bool], range_: str, usual: str
) -> Callable[..., _Number]:
    """Makes a check of the one keyword, which returns it as a Python number."""
    convert = as_number if kind is int else as_real

    def check(*, fix: str = f"Use {usual}.", **value: Any) -> _Number:
        ((name, given),) = value.items()
        number = convert(given)
        if not (type(number) is kind and is_in_range(number)):
            fail(f"{name} must be {range_}", fix=fix, **value)
        return number

    return check


positive_integer = _check(
    int, lambda x: x >= 1, "an integer of at least 1", "1 or more"
)
nonnegative_integer = _check(
    int, lambda x: x >= 0, "an integer of at least 0", "0 or more"
)
real = _check(float, lambda x: not math.isnan(x), "a number", "1.0, for example")
positive = _check(
    float, lambda x: 0 < x < math.inf, "a finite number above 0", "1.0, for example"
)
nonnegative = _check(
    float, lambda x: 0 <= x < math.inf, "a finite number of at least 0", "0.0 or more"
)
probability = _check(float, lambda x: 0 < x <= 1, "in (0, 1]", "0.05 for 5 %")
fraction = _check(float, lambda x: 0 < x < 1, "in (0, 1)", "0.95 for 95 %")


def integer_in(allowed: range, required: str, **value: Any) -> int:
    """Checks that the one keyword is an integer of a range; returns an `int`."""
    (given,) = value.values()
    number = as_number(given)
    if not (type(number) is int and number in allowed):
        fail(required, **value)
    return number


def boolean(*, fix: str = "Use one of them.", **value: Any) -> bool:
    """Checks that the one keyword is a Python or NumPy bool; returns a `bool`."""
    ((name, given),) = value.items()
    if not isinstance(given, bool | np.bool):
        fail(f"{name} must be True or False", fix=fix, **value)
    return bool(given)


def booleans(**values: Any) -> None:
    """Raises ValueError unless all keywords are Python or NumPy bools."""
    for name, given in values.items():
        boolean(**{name: given})


def function(
    *arguments: str, fix: str = "Change its arguments.", **value: Any
) -> Callable[..., Any]:
    """Checks that the one keyword can be called, with `arguments`; returns it."""
    ((name, given),) = value.items()
    wanted = f"{name} must be a function"
    if arguments:
        wanted += f" of ({', '.join(arguments)})"
    if not callable(given):
        fail(f"{wanted}. Pass the function itself.", type=type(given).__name__)
    signature = None
    with contextlib.suppress(TypeError, ValueError):  # some callables have none
        signature = inspect.signature(given)
    try:
        if signature and arguments:
            signature.bind(*arguments)
    except TypeError:
        # Without defaults, which might be arrays of private data.
        shown: Any = f"({', '.join(signature.parameters)})" if signature else ""
        fail(wanted, fix=fix, **{name: shown})
    return given


def instance(
    classes: Any, fix: str, *, error: type[Exception] = RefusedError, **value: Any
) -> Any:
    """Checks that the one keyword is an instance of one of `classes`; returns it."""
    ((name, given),) = value.items()
    if not isinstance(given, classes):
        classes = classes if isinstance(classes, tuple) else (classes,)
        names = " or ".join(each.__name__ for each in classes)
        type_ = type(given).__name__
        fail(f"{name} must be a {names}", fix=fix, error=error, type=type_)
    return given


def one_of(names: Collection[Any], **value: Any) -> Any:
    """Checks that the one keyword is one of some names; returns it."""
    ((name, given),) = value.items()
    if not (isinstance(given, str | None) and given in names):
        fail(f"{name} must be one of {list(names)}. Use one of these.", **value)
    return given


def checked(
    checks: Mapping[str, tuple[Callable[..., Any], str]], **values: Any
) -> list[Any]:
    """Returns the checked values; `checks` has a check and its fix for each name."""
    found = []
    for name, value in values.items():
        check, fix = checks[name]
        found.append(check(**{name: value}, fix=fix))
    return found


def fields(instance: Any, **checks: Callable[..., Any]) -> None:
    """Replaces fields of a frozen dataclass by their checked values."""
    for name, check in checks.items():
        object.__setattr__(instance, name, check(**{name: getattr(instance, name)}))


def optional(check: Callable[..., Any]) -> Callable[..., Any]:
    """Extends a check so that it accepts None."""

    def check_unless_none(**value: Any) -> Any:
        is_none = any(x is None for x in value.values())
        return None if is_none else check(**value)

    return check_unless_none


def check_x64(dtype: Any, what: str) -> None:
    """Raises ValueError where jax would silently turn a float64 into a float32."""
    if np.dtype(dtype) == np.float64 and not jax.config.read("jax_enable_x64"):
        fail(
            f'{what} need 64-bit mode. Call jax.config.update("jax_enable_x64", True) '
            'at start-up, or use float32 (for sums, arithmetic="exact" is better '
            "still).",
            jax_enable_x64=False,
        )
