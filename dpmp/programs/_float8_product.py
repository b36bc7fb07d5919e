"""Arrays that are rounded to 8 bits, each with its own scale, and their products.

A rounded array keeps its dtype. It holds numbers of a float8 format, times a power of
two. A product of such arrays can be taken in their dtype, which emulates float8, or in
8 bits, which `dot_general` here requests. The result is the same.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

PER_EXAMPLE = "per_example"

# The name of `dot_general` in programs, by which book-keeping finds it.
NAME = "dpmp.float8_product"

# Cotangents have less precision and more range.
OPERANDS, COTANGENTS = jnp.float8_e4m3fn, jnp.float8_e5m2


def round_to(x: jax.Array, dtype: Any, scale: str | float) -> jax.Array:
    """Rounds an array to the nearest numbers of a format, times a power of two.

    The result has the dtype of `x`. A finite number out of range becomes the largest
    number of the format. Infinity and NaN stay.

    Args:
      x: float array.
      dtype: the format, `OPERANDS` or `COTANGENTS`.
      scale: the factor for `x` before it is rounded. `PER_EXAMPLE` stands for the
        largest power of two that leaves all entries in range.
    """
    wide = x.astype(jnp.float32)
    exponent = _exponent(wide, dtype, scale)
    numbers = _to_grid(wide * _power_of_two(exponent), jnp.finfo(dtype))
    numbers = numbers * _power_of_two(-exponent)
    return jnp.where(jnp.isfinite(x), numbers.astype(x.dtype), x)


def of_cotangents(scale: str | float) -> str | float:
    """The scale of cotangents: a number does not apply, as a loss scale moves them."""
    return scale if scale == PER_EXAMPLE else 1.0


def _to_grid(x: jax.Array, format: Any) -> jax.Array:
    """Rounds without a cast to float8 and back, which XLA leaves out on GPUs."""
    largest, smallest = float(format.max), float(format.smallest_subnormal)
    x = jnp.clip(x, -largest, largest)
    normal = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=format.nmant)
    subnormal = jnp.round(x * (1 / smallest)) * smallest
    return jnp.where(jnp.abs(x) < float(format.smallest_normal), subnormal, normal)


def _exponent(x: jax.Array, dtype: Any, scale: str | float) -> jax.Array:
    """Returns the exponent of the power of two to multiply by.

    For an array that is rounded already, `PER_EXAMPLE` gives the power it was rounded
    with, or a larger one, so the array stays exact.
    """
    if not isinstance(scale, str):
        return jnp.int32(round(math.log2(scale)))
    largest = jnp.max(jnp.abs(x), initial=0.0)
    # The fractions are compared, since division is not exact on all devices.
    limit, of_limit = math.frexp(float(jnp.finfo(dtype).max))
    fraction, of_largest = jnp.frexp(largest)
    exponent = of_limit - of_largest - (fraction > limit).astype(jnp.int32)
    # Within these limits, neither the power nor its inverse is subnormal.
    exponent = jnp.clip(exponent, -100, 100).astype(jnp.int32)
    return jnp.where((largest > 0) & jnp.isfinite(largest), exponent, 0)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Computes a power of two exactly on any device, from the bits of a float32."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def dot_general(
    x: jax.Array,
    y: jax.Array,
    *,
    dimension_numbers: Any,
    result: Any,
    scale: str | float,
) -> jax.Array:
    """Computes `jax.lax.dot_general` from 8-bit products that are summed in float32.

    The operands are rounded, with `scale`. The caller must round the cotangent of the
    result too, since the products of the gradient are also taken in 8 bits. XLA widens
    the operands on devices that cannot multiply 8-bit numbers. Infinity counts as NaN,
    since float8_e4m3fn has no infinity. `result` has the shape and dtype of the result.
    """
    contracted, batch = dimension_numbers
    config = _Config(scale, jnp.dtype(result.dtype), x.dtype, y.dtype)
    left, right = map(_ordered, (x, y), batch, contracted)
    return _product(config, left, right).reshape(result.shape)


def dimension_numbers(ndim: int) -> Any:
    """The dimension numbers of the product that programs call `NAME`.

    The last axes are contracted. The first of three axes is a batch axis.
    """
    batch = tuple(range(ndim - 2))
    return ((ndim - 1,), (ndim - 1,)), (batch, batch)


def _ordered(x: jax.Array, batch: Sequence[int], contracted: Sequence[int]) -> Any:
    """Joins axes, so that there are: batch (if there is any), free, contracted."""
    free = [i for i in range(x.ndim) if i not in (*batch, *contracted)]
    parts = [axes for axes in (batch, free, contracted) if axes is not batch or axes]
    shape = [math.prod(x.shape[i] for i in axes) for axes in parts]
    return x.transpose(*batch, *free, *contracted).reshape(shape)


class _Config(NamedTuple):
    """The settings of a product."""

    scale: str | float
    dtype: Any
    left_dtype: Any
    right_dtype: Any


class _Float8(NamedTuple):
    """Numbers of 8 bits, and the exponent of the power that they were multiplied by."""

    numbers: jax.Array
    exponent: jax.Array


def _to_float8(x: jax.Array, dtype: Any, scale: str | float) -> _Float8:
    """Converts to 8 bits; this is exact for rounded arrays."""
    wide = x.astype(jnp.float32)
    exponent = _exponent(wide, dtype, scale)
    largest = float(jnp.finfo(dtype).max)
    # A rounded array in float16 may have been rounded up once more.
    scaled = jnp.clip(wide * _power_of_two(exponent), -largest, largest)
    # Devices convert infinity and NaN in different ways.
    numbers = jnp.where(jnp.isfinite(wide), scaled, jnp.nan).astype(dtype)
    return _Float8(numbers, exponent)


def _contract(x: _Float8, y: _Float8, dtype: Any) -> jax.Array:
    total = jax.lax.dot_general(
        x.numbers,
        y.numbers,
        dimension_numbers(x.numbers.ndim),
        # By default, GPUs keep fewer bits than float32 in sums of such products.
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    # The smaller power comes first, so that no intermediate result is out of range.
    exponents = -x.exponent, -y.exponent
    total *= _power_of_two(jnp.minimum(*exponents))
    total *= _power_of_two(jnp.maximum(*exponents))
    return total.astype(dtype)


def _forward(
    config: _Config, x: jax.Array, y: jax.Array
) -> tuple[jax.Array, tuple[_Float8, _Float8]]:
    left, right = (_to_float8(a, OPERANDS, config.scale) for a in (x, y))
    return _contract(left, right, config.dtype), (left, right)


def _backward(
    config: _Config, operands: tuple[_Float8, _Float8], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    ct = _to_float8(cotangent, COTANGENTS, of_cotangents(config.scale))
    turned_ct, left, right = (
        x._replace(numbers=jnp.swapaxes(x.numbers, -1, -2)) for x in (ct, *operands)
    )
    return (
        _contract(ct, right, config.left_dtype),
        _contract(turned_ct, left, config.right_dtype),
    )


def _undifferentiated(config: _Config, x: jax.Array, y: jax.Array) -> jax.Array:
    return _forward(config, x, y)[0]


# A program shows a `jax.custom_vjp` under the name of its function.
_undifferentiated.__name__ = NAME
_product = jax.custom_vjp(_undifferentiated, nondiff_argnums=(0,))
_product.defvjp(_forward, _backward)
