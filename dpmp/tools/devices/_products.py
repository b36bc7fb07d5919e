"""Products by dtype: whether a device runs them, and how much they round."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_MATRICES = "ij,jk->ik"
_FLOAT32_ROUNDOFF = 2.0**-24

# Terms of the sums that errors are measured on, and rows and columns of the operands.
_FEW, _MANY, _SIDE = 16, 4096, 128


class Kind(NamedTuple):
    """A kind of product.

    Attributes:
      name: as reports show it.
      dtype: of both operands.
      result: dtype of the result.
      precision: as in `jax.default_matmul_precision`; None leaves it to jax.
    """

    name: str
    dtype: str
    result: str
    precision: str | None = None

    def __call__(self, a: Any, b: Any, contraction: str = _MATRICES) -> jax.Array:
        """The product, contracted as in `jnp.einsum`."""
        return jnp.einsum(
            contraction,
            a,
            b,
            precision=self.precision,
            preferred_element_type=jnp.dtype(self.result),
        )

    @property
    def largest_rounding_error(self) -> float:
        """What `rounding_error` may be: twice the roundoff, as some units truncate."""
        operands = 2 * _ROUNDOFFS.get(self.name, roundoff(self.dtype))
        result = roundoff(self.result)
        return 2 * (operands + result + _FEW * min(result, _FLOAT32_ROUNDOFF))

    @property
    def largest_sum_error(self) -> float:
        """What `sum_error` is at most, if sums are in float32 and rounded once."""
        return roundoff(self.result)


# What operands are rounded to, where it is not their own dtype: 10 bits behind the
# point in TF32, and perhaps bfloat16 in what jax does by default.
_ROUNDOFFS = {"tf32": 2.0**-11, "float32 by default": 2.0**-8}

_KINDS = (
    Kind("float32", "float32", "float32", "float32"),
    Kind("float32 by default", "float32", "float32"),
    Kind("tf32", "float32", "float32", "tensorfloat32"),
    Kind("bfloat16", "bfloat16", "bfloat16"),
    Kind("bfloat16 -> float32", "bfloat16", "float32"),
    Kind("float16", "float16", "float16"),
    Kind("float16 -> float32", "float16", "float32"),
    Kind("float8_e4m3fn -> float32", "float8_e4m3fn", "float32"),
)
_FLOAT64 = Kind("float64", "float64", "float64", "highest")


def all_kinds() -> tuple[Kind, ...]:
    """Those to measure: float32 first, and float64 only in 64-bit mode."""
    return (*_KINDS, _FLOAT64) if jax.config.read("jax_enable_x64") else _KINDS


def roundoff(dtype: Any) -> float:
    """The largest relative error of rounding a number to a dtype."""
    return float(jnp.finfo(dtype).eps) / 2


def place(x: Any, dtype: Any, device: Any) -> jax.Array:
    """An array on a device, rounded to a dtype on the host."""
    return jax.device_put(np.asarray(x).astype(jnp.dtype(dtype)), device)


def compile_product(
    kind: Kind, a: jax.Array, b: jax.Array, contraction: str = _MATRICES
) -> Callable[..., jax.Array]:
    """The program for operands like these, on the device they are on."""
    return jax.jit(lambda a, b: kind(a, b, contraction)).lower(a, b).compile()


def attempt(run: Callable[[], Any]) -> tuple[Any, str | None]:
    """What `run` returns, or None and the exception that it raises."""
    try:
        return jax.block_until_ready(run()), None
    except Exception as error:  # which ones a backend raises is not documented
        message = str(error).strip().partition("\n")[0]
        return None, f"{type(error).__name__}: {message[:200]}"


def run_tiny(kind: Kind, device: Any) -> jax.Array:
    """The product of two matrices of ones."""
    ones = place(np.ones((16, 16)), kind.dtype, device)
    return compile_product(kind, ones, ones)(ones, ones)


def compile_all(
    kinds: Iterable[Kind],
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    device: Any,
    contraction: str = _MATRICES,
) -> tuple[dict[str, Callable[[], jax.Array]], dict[str, str]]:
    """Products of random operands, by name, and the exceptions of those that fail."""
    programs, errors = {}, {}
    for kind in kinds:
        prepare = functools.partial(_prepare, kind, shapes, device, contraction)
        program, error = attempt(prepare)
        if error is None:
            programs[kind.name] = program
        else:
            errors[kind.name] = error
    return programs, errors


def _prepare(
    kind: Kind, shapes: Any, device: Any, contraction: str
) -> Callable[[], jax.Array]:
    # Operands of its own: nothing is in a cache because another kind left it there.
    a, b = _operands(shapes, kind.dtype, device)
    program = compile_product(kind, a, b, contraction)
    jax.block_until_ready(program(a, b))  # some fail only now
    return functools.partial(program, a, b)


def _operands(
    shapes: Iterable[tuple[int, ...]], dtype: str, device: Any
) -> tuple[jax.Array, ...]:
    # A few numbers over and over again: time does not depend on them.
    numbers = np.random.default_rng(0).standard_normal(4099, np.float32)
    return tuple(place(np.resize(numbers, shape), dtype, device) for shape in shapes)


def rounding_error(kind: Kind, device: Any) -> float:
    """The largest relative error of products of float32 numbers from 1 to 2.

    In sums of so few terms the rounding of operands shows, whether that is to their
    dtype beforehand or inside of the product.
    """
    rng = np.random.default_rng(0)
    a, b = rng.uniform(1, 2, (2, _SIDE, _FEW)).astype(np.float32)
    return _error(kind, a, b.T, device)


def sum_error(kind: Kind, device: Any) -> float:
    """The largest relative error of long sums of products of short numbers.

    The numbers are eighths from 1 to 15/8, which all dtypes hold; the sums have at
    most 20 bits, so that float32 adds them without error, in any order. What is left is
    the rounding of the result, or of sums that are narrower than float32.
    """
    rng = np.random.default_rng(0)
    a, b = 1 + rng.integers(0, 8, (2, _SIDE, _MANY)) / 8
    return _error(kind, a, b.T, device)


def _error(kind: Kind, a: Any, b: Any, device: Any) -> float:
    operands = place(a, kind.dtype, device), place(b, kind.dtype, device)
    actual = compile_product(kind, *operands)(*operands)
    # Exact for float32 operands: their products have 48 bits.
    exact = a.astype(np.float64) @ b.astype(np.float64)
    error = np.max(np.abs(np.asarray(actual).astype(np.float64) / exact - 1))
    if not np.isfinite(error):
        raise FloatingPointError("a product of small numbers is not finite")
    return float(error)
