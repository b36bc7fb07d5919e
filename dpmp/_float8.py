"""Products of operands that are rounded to 8 bits, emulated in a wider dtype.

What goes into a product is rounded to float8_e4m3fn, and the cotangent of what comes
out of it to float8_e5m2, which has less precision and more range. An array is scaled by
a power of two so that its largest entry is just below the largest that the format has.
That scale is computed from the array itself: in the loss of one example, from that
example (and parameters, which are no secret). A history of largest entries, which is
common outside of privacy, would carry what one example does over to all others.

References:
  Micikevicius et al.: FP8 formats for deep learning, 2022, sections 3 and 4.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpmp import _jaxpr, _validate
from dpmp._typing import PyTree

PER_EXAMPLE = "per_example"

_PRODUCTS = ("dot_general", "conv_general_dilated")
_OPERANDS = jnp.float8_e4m3fn
_COTANGENTS = jnp.float8_e5m2


def with_float8_products(
    fun: Callable[..., PyTree], scale: str | float, *, widest: Any = jnp.float32
) -> Callable[..., PyTree]:
    """`fun` with products of numbers that float8 has, and such a gradient.

    Functions with derivatives of their own (`jax.custom_jvp`, `jax.custom_vjp`) are
    left as they are.

    Args:
      fun: a traceable function, of one example if scales are to be of one.
      scale: `PER_EXAMPLE` for scales from the arrays themselves; or a power of two,
        that all operands are multiplied by, and no cotangent.
      widest: products with an operand of a wider dtype are left as they are.
    """
    largest_size = jnp.dtype(widest).itemsize

    def is_rounded(eqn: Any) -> bool:
        if eqn.primitive.name not in _PRODUCTS:
            return False
        dtypes = [v.aval.dtype for v in eqn.invars]
        return all(
            jnp.issubdtype(x, jnp.floating) and x.itemsize <= largest_size
            for x in dtypes
        )

    @functools.wraps(fun)
    def float8_fun(*args: Any, **kwargs: Any) -> PyTree:
        closed, treedef = _jaxpr.trace(lambda *xs: fun(*xs, **kwargs), *args)
        results = _run(closed, jax.tree.leaves(args), scale, is_rounded)
        return jax.tree.unflatten(treedef, results)

    return float8_fun


def check_scale(scale: str | float | None) -> None:
    """Raises ValueError for what is no scale."""
    _validate.require(
        scale in (None, PER_EXAMPLE) or _validate.is_scale(scale),
        f'float8_scale must be "{PER_EXAMPLE}" or a power of two, from 2^-40 to 2^40',
        float8_scale=scale,
        fix=f'Use "{PER_EXAMPLE}": scales that examples share must not depend on them.',
    )


def _run(
    closed: Any,
    values: Sequence[Any],
    scale: str | float,
    is_rounded: Callable[[Any], bool],
) -> list[Any]:
    def run_body(body: Any, values: Sequence[Any]) -> list[Any]:
        return _run(body, values, scale, is_rounded)

    def evaluate(eqn: Any, values: list[Any]) -> list[Any]:
        if not is_rounded(eqn):
            return _jaxpr.bind_bodies(eqn, values, run_body)
        (result,) = _jaxpr.bind(eqn, [_with_rounded_value(x, scale) for x in values])
        return [_with_rounded_cotangent(scale, result)]

    return _jaxpr.run(closed, values, evaluate)


def _with_rounded_value(x: jax.Array, scale: str | float) -> jax.Array:
    """Gradients pass as if nothing had been rounded."""
    constant = jax.lax.stop_gradient
    return constant(_rounded(x, _OPERANDS, scale)) + (x - constant(x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_rounded_cotangent(scale: str | float, x: jax.Array) -> jax.Array:
    del scale
    return x


def _keep_nothing(scale: str | float, x: jax.Array) -> tuple[jax.Array, None]:
    del scale
    return x, None


def _round_cotangent(
    scale: str | float, _: None, cotangent: jax.Array
) -> tuple[jax.Array]:
    # A loss scale moves all cotangents; another constant factor would do the same.
    is_static = scale != PER_EXAMPLE
    return (_rounded(cotangent, _COTANGENTS, 1.0 if is_static else scale),)


_with_rounded_cotangent.defvjp(_keep_nothing, _round_cotangent)


def _rounded(x: jax.Array, dtype: Any, scale: str | float) -> jax.Array:
    """The nearest numbers of a format; the largest for what is finite and beyond it."""
    wide = x.astype(jnp.float32)
    factor = _fitting_scale(wide, dtype) if scale == PER_EXAMPLE else jnp.float32(scale)
    rounded = _to_grid(wide * factor, jnp.finfo(dtype))
    return jnp.where(jnp.isfinite(x), (rounded / factor).astype(x.dtype), x)


def _to_grid(x: jax.Array, format: Any) -> jax.Array:
    """Without a cast there and back, which XLA leaves out on GPUs."""
    largest, smallest = float(format.max), float(format.smallest_subnormal)
    x = jnp.clip(x, -largest, largest)
    normal = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=format.nmant)
    subnormal = jnp.round(x / smallest) * smallest
    return jnp.where(jnp.abs(x) < float(format.smallest_normal), subnormal, normal)


def _fitting_scale(x: jax.Array, dtype: Any) -> jax.Array:
    """The largest power of two that leaves all entries in range, or one."""
    largest = jnp.max(jnp.abs(x), initial=0.0)
    _, exponent = jnp.frexp(jnp.float32(jnp.finfo(dtype).max) / largest)
    # Such that neither the scale nor its inverse is subnormal.
    scale = jnp.ldexp(jnp.float32(1), jnp.clip(exponent - 1, -100, 100))
    return jnp.where((largest > 0) & jnp.isfinite(largest), scale, jnp.float32(1))
