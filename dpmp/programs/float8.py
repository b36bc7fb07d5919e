"""Products with float8 operands, in losses and their gradients.

The operands of a product are rounded to float8_e4m3fn. The cotangent of its result is
rounded to float8_e5m2, which has less precision and more range. Each array is scaled by
a power of two, so that its largest entry is just below the largest number of the
format. A rounded array keeps its dtype. A product of rounded arrays can be taken in
their dtype, which emulates float8, or in 8 bits. The result is the same.

The scale is computed from the array itself. So in the loss of one example, it depends
on that example alone (and on parameters, which are public). In other libraries, scales
often come from a history of largest entries, which would let one example influence all
others.

References:
  Micikevicius et al.: FP8 formats for deep learning, 2022, sections 3 and 4.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp._validate import as_real
from dpmp.programs import bodies, interpreter, primitives

PER_EXAMPLE = "per_example"

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


def with_float8_products(
    fun: Callable[..., PyTree],
    scale: str | float,
    *,
    widest: Any = jnp.float32,
    native: bool | None = None,
) -> Callable[..., PyTree]:
    """Makes `fun` compute its products with float8 operands, also in its gradient.

    Functions with derivatives of their own (`jax.custom_jvp`, `jax.custom_vjp`) stay as
    they are.

    Args:
      fun: a traceable function. It takes one example if scales are to depend on one.
      scale: `PER_EXAMPLE` for scales that are computed from the arrays, or a power of
        two that multiplies all operands, and no cotangent.
      widest: a product with an operand of a wider dtype stays as it is.
      native: whether the device computes dot products with 8-bit numbers; None asks
        `is_native`. Convolutions are emulated in the dtype of their operands.
    """
    largest_size = jnp.dtype(widest).itemsize

    def run(closed: Any, values: Sequence[Any]) -> list[Any]:
        return interpreter.run(closed, values, evaluate)

    def evaluate(eqn: Any, values: list[Any]) -> list[Any]:
        dtypes = [v.aval.dtype for v in eqn.invars]
        if eqn.primitive.name not in primitives.PRODUCTS or not all(
            jnp.issubdtype(x, jnp.floating) and x.itemsize <= largest_size
            for x in dtypes
        ):
            return bodies.bind_bodies(eqn, values, run)
        operands = [_with_rounded_value(x, scale) for x in values]
        is_dot = eqn.primitive.name == primitives.DOT_GENERAL
        if is_dot and (is_native() if native is None else native):
            result = _dot_general(eqn, scale, *operands)
        else:
            (result,) = interpreter.bind(eqn, operands)
        return [_with_rounded_cotangent(scale, result)]

    @functools.wraps(fun)
    def float8_fun(*args: Any, **kwargs: Any) -> PyTree:
        closed, treedef = interpreter.trace(lambda *xs: fun(*xs, **kwargs), *args)
        return jax.tree.unflatten(treedef, run(closed, jax.tree.leaves(args)))

    return float8_fun


def check_scale(scale: str | float | None) -> str | float | None:
    """Returns the scale as a Python value; raises ValueError if it is invalid."""
    if not isinstance(scale, str):
        scale = as_real(scale)
    _validate.require(
        scale in (None, PER_EXAMPLE) or _validate.is_scale(scale),
        f'float8_scale must be "{PER_EXAMPLE}" or a power of two, from 2^-40 to 2^40. '
        f'Use "{PER_EXAMPLE}": a shared scale must not depend on examples.',
        float8_scale=scale,
    )
    return scale


def _with_rounded_value(x: jax.Array, scale: str | float) -> jax.Array:
    """Rounds a value; gradients pass as if it had not been rounded."""
    constant = jax.lax.stop_gradient(x)
    return round_to(constant, OPERANDS, scale) + (x - constant)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_rounded_cotangent(scale: str | float, x: jax.Array) -> jax.Array:
    del scale
    return x


_with_rounded_cotangent.defvjp(
    lambda _, x: (x, None),
    lambda scale, _, ct: (round_to(ct, COTANGENTS, _of_cotangents(scale)),),
)


def round_to(x: jax.Array, dtype: Any, scale: str | float) -> jax.Array:
    """Rounds an array to the nearest numbers of a format, times a power of two.

    The result has the dtype of `x`. `dtype` is the format, `OPERANDS` or `COTANGENTS`.
    A finite number out of range becomes the largest number of the format. Infinity and
    NaN stay. `scale` multiplies `x` before it is rounded; `PER_EXAMPLE` stands for the
    largest power of two that leaves all entries in range.
    """
    wide = x.astype(jnp.float32)
    exponent = _exponent(wide, dtype, scale)
    numbers = _to_grid(wide * _power_of_two(exponent), jnp.finfo(dtype))
    numbers = numbers * _power_of_two(-exponent)
    return jnp.where(jnp.isfinite(x), numbers.astype(x.dtype), x)


def _of_cotangents(scale: str | float) -> str | float:
    """The scale of cotangents, 1 unless `PER_EXAMPLE`: a loss scale moves them."""
    return scale if scale == PER_EXAMPLE else 1.0


def _to_grid(x: jax.Array, format: Any) -> jax.Array:
    """Rounds without a cast to float8 and back, which XLA removes on GPUs."""
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


def _dot_general(eqn: Any, scale: str | float, x: jax.Array, y: jax.Array) -> jax.Array:
    """Computes a dot product from 8-bit products that are summed in float32.

    The operands are rounded, with `scale`. The caller must round the cotangent of the
    result too, since the products of the gradient are also taken in 8 bits. XLA widens
    the operands on devices that cannot multiply 8-bit numbers. Infinity becomes NaN,
    since float8_e4m3fn has no infinity.
    """
    contracted, batch = eqn.params["dimension_numbers"]
    result = eqn.outvars[0].aval
    config = _Config(scale, jnp.dtype(result.dtype), x.dtype, y.dtype)
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


def _forward(config: _Config, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
    left, right = (_to_float8(a, OPERANDS, config.scale) for a in (x, y))
    return _contract(left, right, config.dtype), (left, right)


def _backward(
    config: _Config, operands: tuple[_Float8, _Float8], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    ct = _to_float8(cotangent, COTANGENTS, _of_cotangents(config.scale))
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
