"""Number formats of few bits, and how arrays are rounded to them.

A rounded array keeps its dtype, and has the numbers of the format times a *scale*: one
for the whole array, or one for each block of entries that follow each other along an
axis. (In 16 bits, some of these products are rounded once more.) The scale is computed
from the array itself. So in the loss of one example, it depends on that example alone
(and on parameters, which are public). In other libraries, scales often come from a
history of largest entries, which would let one example influence all others.

References:
  Micikevicius et al.: FP8 formats for deep learning, 2022, sections 3 and 4.
  Rouhani et al.: Microscaling data formats for deep learning, 2023.
  NVIDIA: Pretraining large language models with NVFP4, 2025.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# The formats "float8" of operands and of cotangents.
_OPERANDS, _COTANGENTS = jnp.float8_e4m3fn, jnp.float8_e5m2


class Format(NamedTuple):
    """How the operands of a product, and the cotangent of its result, are rounded.

    Attributes:
      operands: the dtype of operands.
      cotangents: the dtype of cotangents; None to leave them as they are.
      block: the number of entries of a block; None for one scale for an array.
      dithers: whether cotangents are rounded up or down by chance, so that their mean
        stays. The bits of a number decide, so that it is always rounded alike.
    """

    operands: Any
    cotangents: Any
    block: int | None = None
    dithers: bool = False


FORMATS = {
    "float8": Format(_OPERANDS, _COTANGENTS),
    "mxfp8": Format(_OPERANDS, _OPERANDS, 32),
    "nvfp4": Format(jnp.float4_e2m1fn, jnp.float4_e2m1fn, 16, dithers=True),
    "int8": Format(jnp.int8, jnp.int8, 128, dithers=True),
}
FORMATS |= {
    f"{name}_forward": form._replace(cotangents=None) for name, form in FORMATS.items()
}


def round_to(
    x: jax.Array,
    dtype: Any,
    block: int | None = None,
    axis: int = -1,
    *,
    dithers: bool = False,
) -> jax.Array:
    """Rounds an array to the numbers of a format, times scales.

    Infinity and NaN stay. With 8-bit floats, a scale is the largest power of two that
    leaves all entries of its block in range. With NVFP4, it is a number of
    float8_e4m3fn, times a power of two for the array; with int8, any number.
    """
    wide = x.astype(jnp.float32)
    if block is not None and x.ndim:
        wide = jnp.moveaxis(wide, axis, -1)
    sizes = spread(largest_of_blocks(wide, block), wide, block)
    chance = _chance(wide) if dithers else None
    numbers = _rounded(wide, sizes, jnp.dtype(dtype), chance)
    if block is not None and x.ndim:
        numbers = jnp.moveaxis(numbers, -1, axis)
    return jnp.where(jnp.isfinite(x), numbers.astype(x.dtype), x)


def largest_of_blocks(x: jax.Array, block: int | None) -> jax.Array:
    """The largest size in each block along the last axis: (..., blocks), or ()."""
    if block is None or not x.ndim:
        return jnp.max(jnp.abs(x), initial=0.0)
    missing = -x.shape[-1] % block
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    blocks = padded.reshape(*x.shape[:-1], padded.shape[-1] // block, block)
    return jnp.max(jnp.abs(blocks), axis=-1, initial=0.0)


def spread(sizes: jax.Array, like: jax.Array, block: int | None) -> jax.Array:
    """Repeats the number of each block for its entries, in the shape of `like`."""
    if block is None or not like.ndim:
        return sizes
    return jnp.repeat(sizes, block, axis=-1)[..., : like.shape[-1]]


def _rounded(x: jax.Array, sizes: jax.Array, dtype: Any, chance: Any) -> jax.Array:
    is_usable = (sizes > 0) & jnp.isfinite(sizes)
    if dtype == jnp.int8:
        unit = sizes / 127
        smallest = float(jnp.finfo(jnp.float32).smallest_normal)
        unit = jnp.where(is_usable & (unit >= smallest), unit, 1.0)
        return jnp.clip(_to_integer(x / unit, chance), -127, 127) * unit
    if dtype == jnp.float4_e2m1fn:
        units = jnp.where(is_usable, sizes / float(jnp.finfo(dtype).max), 0.0)
        power = exponent_of(jnp.max(units, initial=0.0), _OPERANDS)
        scaled = units * power_of_two(power)
        units = _to_grid(scaled, jnp.finfo(_OPERANDS))
        units = units * power_of_two(-power)
        divisors = jnp.where(units > 0, units, 1.0)
        return _to_grid(x / divisors, jnp.finfo(dtype), chance) * units
    exponent = exponent_of(sizes, dtype)
    numbers = _to_grid(x * power_of_two(exponent), jnp.finfo(dtype), chance)
    return numbers * power_of_two(-exponent)


def _to_grid(x: jax.Array, format: Any, chance: Any = None) -> jax.Array:
    """Rounds without a cast to the format and back, which XLA removes on GPUs."""
    largest, smallest = float(format.max), float(format.smallest_subnormal)
    x = jnp.clip(x, -largest, largest)
    if chance is not None:
        _, exponents = jnp.frexp(jnp.maximum(jnp.abs(x), float(format.smallest_normal)))
        steps = power_of_two(exponents - 1 - format.nmant)
        return jnp.clip(_to_integer(x / steps, chance) * steps, -largest, largest)
    normal = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=format.nmant)
    subnormal = jnp.round(x * (1 / smallest)) * smallest
    return jnp.where(jnp.abs(x) < float(format.smallest_normal), subnormal, normal)


def _to_integer(x: jax.Array, chance: Any) -> jax.Array:
    return jnp.round(x) if chance is None else jnp.floor(x + chance)


def _chance(x: jax.Array) -> jax.Array:
    """Numbers from 0 to 1 that look random: hashes of the bits and the positions."""
    # Without the last bits, which depend on the order of additions.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) >> 12
    for axis in range(x.ndim):
        position = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        bits = _mixed(bits ^ (position + jnp.uint32(0x9E3779B9)))
    return (_mixed(bits) >> 8).astype(jnp.float32) * 2.0**-24


def _mixed(x: jax.Array) -> jax.Array:
    """The finalizer of MurmurHash3."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)


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
