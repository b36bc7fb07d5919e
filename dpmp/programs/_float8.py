"""Losses whose products have operands that are rounded to 8 bits.

The operands of a product are rounded to float8_e4m3fn. The cotangent of its result is
rounded to float8_e5m2, which has less precision and more range. Each array is scaled by
a power of two, so that its largest entry is just below the largest number of the
format. The scale is computed from the array itself. So in the loss of one example, it
depends on that example alone (and on parameters, which are no secret). Outside of
privacy, scales often come from a history of largest entries. Such a history would let
one example influence all others.

References:
  Micikevicius et al.: FP8 formats for deep learning, 2022, sections 3 and 4.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpmp import _validate
from dpmp._numbers import as_real
from dpmp._typing import PyTree
from dpmp.programs import _bodies, _float8_product, _interpreter
from dpmp.programs._float8_product import COTANGENTS, OPERANDS, PER_EXAMPLE

_PRODUCTS = ("dot_general", "conv_general_dilated")


def is_native() -> bool:
    """Whether the default device multiplies 8-bit numbers.

    NVIDIA GPUs do, from compute capability 8.9 on. Other devices are unknown in this
    respect, or have other 8-bit formats.
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

    def is_rounded(eqn: Any) -> bool:
        return eqn.primitive.name in _PRODUCTS and all(
            jnp.issubdtype(v.aval.dtype, jnp.floating)
            and v.aval.dtype.itemsize <= largest_size
            for v in eqn.invars
        )

    def product(eqn: Any, operands: list[jax.Array]) -> jax.Array:
        is_asked_for = is_native() if native is None else native
        if not is_asked_for or eqn.primitive.name != "dot_general":
            return _interpreter.bind(eqn, operands)[0]
        return _float8_product.dot_general(
            *operands,
            dimension_numbers=eqn.params["dimension_numbers"],
            result=eqn.outvars[0].aval,
            scale=scale,
        )

    def run(closed: Any, values: Sequence[Any]) -> list[Any]:
        return _interpreter.run(closed, values, evaluate)

    def evaluate(eqn: Any, values: list[Any]) -> list[Any]:
        if not is_rounded(eqn):
            return _bodies.bind_bodies(eqn, values, run)
        result = product(eqn, [_with_rounded_value(x, scale) for x in values])
        return [_with_rounded_cotangent(scale, result)]

    @functools.wraps(fun)
    def float8_fun(*args: Any, **kwargs: Any) -> PyTree:
        closed, treedef = _interpreter.trace(lambda *xs: fun(*xs, **kwargs), *args)
        return jax.tree.unflatten(treedef, run(closed, jax.tree.leaves(args)))

    return float8_fun


def check_scale(scale: str | float | None) -> str | float | None:
    """Returns the scale as a Python value; raises ValueError if it is invalid."""
    if not isinstance(scale, str):
        scale = as_real(scale)
    _validate.require(
        scale in (None, PER_EXAMPLE) or _validate.is_scale(scale),
        f'float8_scale must be "{PER_EXAMPLE}" or a power of two, from 2^-40 to 2^40',
        float8_scale=scale,
        fix=f'Use "{PER_EXAMPLE}": a shared scale must not depend on examples.',
    )
    return scale


def _with_rounded_value(x: jax.Array, scale: str | float) -> jax.Array:
    """Rounds a value; gradients pass as if it had not been rounded."""
    constant = jax.lax.stop_gradient(x)
    return _float8_product.round_to(constant, OPERANDS, scale) + (x - constant)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_rounded_cotangent(scale: str | float, x: jax.Array) -> jax.Array:
    del scale
    return x


def _round_cotangent(
    scale: str | float, _: None, cotangent: jax.Array
) -> tuple[jax.Array]:
    scale = _float8_product.of_cotangents(scale)
    return (_float8_product.round_to(cotangent, COTANGENTS, scale),)


_with_rounded_cotangent.defvjp(lambda _, x: (x, None), _round_cotangent)
