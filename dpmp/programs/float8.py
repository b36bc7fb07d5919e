"""Products in 8 bits, on devices that have them, of operands rounded to float8.

An array has one scale: the largest power of two that leaves all its entries in the
range of the format. Other devices multiply the rounded operands in a wider dtype
(`rounded_products.py`). The result is the same.

References:
  Micikevicius et al.: FP8 formats for deep learning, 2022, sections 3 and 4.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# The name of a product in 8 bits in programs, by which book-keeping finds it.
PRODUCT_NAME = "dpmp.float8_product"

OPERANDS, COTANGENTS = jnp.float8_e4m3fn, jnp.float8_e5m2


def is_native() -> bool:
    """Whether the default device multiplies 8-bit numbers.

    NVIDIA GPUs do, from compute capability 8.9 on. False stands for all other devices:
    they have other 8-bit formats, or it is not known whether they do.
    """
    chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    device = chosen or jax.devices()[0]
    if isinstance(device, str):
        device = jax.devices(device)[0]
    capability = str(getattr(device, "compute_capability", ""))
    if device.platform != "gpu" or not re.fullmatch(r"\d+\.\d+", capability):
        return False
    major, minor = capability.split(".")
    return (int(major), int(minor)) >= (8, 9)


def exponent_of(largest: jax.Array, dtype: Any) -> jax.Array:
    """The exponent of the largest power of two that leaves a number in range.

    For an array that is rounded already, it is the one it was rounded with, or a larger
    one, so that the array stays exact.
    """
    # The fractions are compared, since division is not exact on all devices.
    limit, of_limit = math.frexp(float(jnp.finfo(dtype).max))
    fraction, of_largest = jnp.frexp(largest)
    exponent = of_limit - of_largest - (fraction > limit).astype(jnp.int32)
    # Within these limits, neither the power nor its inverse is subnormal.
    exponent = jnp.clip(exponent, -100, 100).astype(jnp.int32)
    return jnp.where((largest > 0) & jnp.isfinite(largest), exponent, 0)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """Computes a power of two exactly on any device, from the bits of a float32."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def dot_general(eqn: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Computes a dot product from 8-bit products that are summed in float32.

    The operands are rounded. The caller must round the cotangent of the result too,
    since the products of the gradient are also taken in 8 bits. XLA widens the operands
    on devices that cannot multiply 8-bit numbers. Infinity becomes NaN, since
    float8_e4m3fn has no infinity.
    """
    contracted, batch = eqn.params["dimension_numbers"]
    result = eqn.outvars[0].aval
    config = _Config(jnp.dtype(result.dtype), x.dtype, y.dtype)
    left, right = map(_ordered, (x, y), batch, contracted)
    return _product(config, left, right).reshape(result.shape)


def dimension_numbers(ndim: int) -> Any:
    """The dimension numbers of the product that programs call `PRODUCT_NAME`.

    The last axes are contracted. The first of three axes is a batch axis.
    """
    batch = tuple(range(ndim - 2))
    return ((ndim - 1,), (ndim - 1,)), (batch, batch)


def _ordered(x: jax.Array, batch: Sequence[int], contracted: Sequence[int]) -> Any:
    """Joins axes to a batch axis (if any), a free axis and a contracted axis."""
    free = [i for i in range(x.ndim) if i not in (*batch, *contracted)]
    parts = [axes for axes in (batch, free, contracted) if axes is not batch or axes]
    shape = [math.prod(x.shape[i] for i in axes) for axes in parts]
    return x.transpose(*batch, *free, *contracted).reshape(shape)


class _Config(NamedTuple):
    """The dtypes of a product and its operands."""

    dtype: Any
    left_dtype: Any
    right_dtype: Any


class _Float8(NamedTuple):
    """Numbers of 8 bits, and the exponent of the power that they were multiplied by."""

    numbers: jax.Array
    exponent: jax.Array


def _to_float8(x: jax.Array, dtype: Any) -> _Float8:
    """Converts to 8 bits; this is exact for rounded arrays."""
    wide = x.astype(jnp.float32)
    exponent = exponent_of(jnp.max(jnp.abs(wide), initial=0.0), dtype)
    largest = float(jnp.finfo(dtype).max)
    # A rounded array in float16 may have been rounded up once more.
    scaled = jnp.clip(wide * power_of_two(exponent), -largest, largest)
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
    total *= power_of_two(jnp.minimum(*exponents))
    total *= power_of_two(jnp.maximum(*exponents))
    return total.astype(dtype)


def _forward(config: _Config, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
    left, right = (_to_float8(a, OPERANDS) for a in (x, y))
    return _contract(left, right, config.dtype), (left, right)


def _backward(
    config: _Config, operands: tuple[_Float8, _Float8], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    ct = _to_float8(cotangent, COTANGENTS)
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
_undifferentiated.__name__ = PRODUCT_NAME
_product = jax.custom_vjp(_undifferentiated, nondiff_argnums=(0,))
_product.defvjp(_forward, _backward)
