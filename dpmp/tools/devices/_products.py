"""Products of matrices by dtype: programs that compute them, and their errors."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_MATRICES = "ij,jk->ik"

# Errors are measured on results of this many rows and columns. Their entries are sums
# of few terms, or of many.
_SIDE, _FEW, _MANY = 128, 16, 4096


class Kind(NamedTuple):
    """A product of two operands of one dtype, with a result of this or another dtype.

    The precision is a value of `jax.default_matmul_precision`.
    """

    name: str
    dtype: str
    result: str
    precision: str | None = None

    def __call__(self, a: Any, b: Any, contraction: str = _MATRICES) -> jax.Array:
        """Computes the product. The contraction is written as for `jnp.einsum`."""
        options = {"precision": self.precision, "preferred_element_type": self.result}
        return jnp.einsum(contraction, a, b, **options)


KINDS = (
    Kind("float32", "float32", "float32", "float32"),
    Kind("float32 by default", "float32", "float32"),
    Kind("tf32", "float32", "float32", "tensorfloat32"),
    Kind("bfloat16", "bfloat16", "bfloat16"),
    Kind("bfloat16 -> float32", "bfloat16", "float32"),
    Kind("float16", "float16", "float16"),
    Kind("float16 -> float32", "float16", "float32"),
    Kind("float8_e4m3fn -> float32", "float8_e4m3fn", "float32"),
)


def compile_product(
    kind: Kind, a: np.ndarray, b: np.ndarray, contraction: str = _MATRICES
) -> Callable[[], jax.Array]:
    """Compiles a product of two arrays of the host, and runs it once.

    Every program has operands of its own, so that no program finds its operands in a
    cache because another one has just used them.
    """
    operands = [jnp.asarray(x.astype(jnp.dtype(kind.dtype))) for x in (a, b)]
    program = jax.jit(lambda a, b: kind(a, b, contraction)).lower(*operands).compile()
    jax.block_until_ready(program(*operands))  # some products fail only here
    return functools.partial(program, *operands)


def compile_all(
    kinds: Iterable[Kind],
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    contraction: str = _MATRICES,
) -> tuple[dict[str, Callable[[], jax.Array]], dict[str, str]]:
    """Compiles products of random operands.

    Returns, by the names of the kinds, the programs of the products that run, and the
    exceptions of the products that do not.
    """
    # A few numbers are repeated, since the time does not depend on them.
    numbers = np.random.default_rng(0).standard_normal(4099, np.float32)
    a, b = (np.resize(numbers, shape) for shape in shapes)
    programs, errors = {}, {}
    for kind in kinds:
        try:
            programs[kind.name] = compile_product(kind, a, b, contraction)
        except Exception as error:  # backends do not document what they raise
            message = str(error).strip().partition("\n")[0]
            errors[kind.name] = f"{type(error).__name__}: {message[:200]}"
    return programs, errors


def rounding_error(kind: Kind) -> float:
    """The largest relative error of sums of few products of numbers from 1 to 2.

    The numbers have all bits of float32, so the error shows how operands are rounded,
    before the product or inside of it.
    """
    rng = np.random.default_rng(0)
    return _error(kind, *rng.uniform(1, 2, (2, _SIDE, _FEW)).astype(np.float32))


def adds_in_float32(kind: Kind) -> bool:
    """Whether long sums of products are in float32 or wider until they are rounded.

    The operands are eighths from 1 to 15/8, which all dtypes hold. Float32 adds their
    products without error in any order, because the sums have at most 20 bits. So the
    only error that float32 explains is that of rounding the result once.
    """
    rng = np.random.default_rng(0)
    operands = 1 + rng.integers(0, 8, (2, _SIDE, _MANY)) / 8
    return _error(kind, *operands) <= float(jnp.finfo(kind.result).eps) / 2


def _error(kind: Kind, a: np.ndarray, b: np.ndarray) -> float:
    actual = np.asarray(compile_product(kind, a, b.T)()).astype(np.float64)
    # Float64 is exact for products of float32 numbers, which have 48 bits.
    exact = a.astype(np.float64) @ b.T.astype(np.float64)
    return float(np.max(np.abs(actual / exact - 1)))
