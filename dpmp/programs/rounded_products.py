"""Products whose operands are rounded to few bits, in losses and their gradients.

The operands of a product are rounded to a format, and so is the cotangent of its
result. The product is then taken in the dtype of the operands, which emulates the
format, or in 8 bits on devices that can. The result is the same. Which format a product
has depends on the parameter that it multiplies by: the walk follows parameters through
casts, transpositions, reshapes and slices.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from dpmp._typing import PyTree
from dpmp.programs import analysis, formats, interpreter, primitives

# The name of a product in 8 bits in programs, by which book-keeping finds it.
PRODUCT_NAME = "dpmp.float8_product"

_FLOAT8 = formats.FORMATS["float8"]

# For each value, the number of the parameter that it is a view of, or None.
Origins: TypeAlias = Sequence[int | None]

# A view of a parameter has its entries alone. The rows of an embedding are data.
_MIXED = {primitives.CONCATENATE, primitives.GATHER, primitives.SELECT}
_FOLLOWED = {*primitives.MOVES, *primitives.SAME_ENTRIES} - _MIXED


class Choice(NamedTuple):
    """The format of a product, and whether it is rounded in this step.

    `is_rounded` is a number, 0 or 1, which may be traced; None for always.
    """

    format: str
    is_rounded: jax.Array | None = None


def with_rounded_products(
    fun: Callable[..., PyTree],
    choose: Callable[[int | None], Choice | None],
    *,
    widest: Any = jnp.float32,
    native: bool | None = None,
) -> Callable[..., PyTree]:
    """Makes `fun` compute its products with rounded operands, also in its gradient.

    Functions with derivatives of their own (`jax.custom_jvp`, `jax.custom_vjp`) stay as
    they are.

    Args:
      fun: a traceable function. It takes one example if scales are to depend on one.
      choose: returns what happens to a product, given the number of the parameter (a
        leaf of the first argument) that it multiplies by, or None if it multiplies by
        none. It returns None to leave the product as it is.
      widest: a product with an operand of a wider dtype stays as it is, and so does one
        of float64.
      native: whether the device computes dot products with 8-bit numbers; None asks
        `is_native`. Only the format "float8" is ever taken in 8 bits.
    """
    largest_size = min(jnp.dtype(widest).itemsize, 4)

    def run(origins: Origins, closed: Any, values: Sequence[Any]) -> list[Any]:
        known = dict(zip(closed.jaxpr.invars, origins, strict=True))

        def origins_of(atoms: Sequence[Any]) -> Origins:
            return [
                None if x is None or interpreter.is_literal(x) else known.get(x)
                for x in atoms
            ]

        def evaluate(eqn: Any, values: list[Any]) -> list[Any]:
            own = [x for x in origins_of(eqn.invars) if x is not None]
            if own and eqn.primitive.name in _FOLLOWED:
                known.update(dict.fromkeys(eqn.outvars, own[0]))
            if _is_product(eqn, largest_size):
                choice = choose(own[-1] if own else None)
                if choice is not None:
                    return _product(eqn, choice, values, native)
            inner = {
                id(x.jaxpr): origins_of(x.invars) for x in analysis.sub_programs(eqn)
            }

            def run_body(body: Any, values: Sequence[Any]) -> list[Any]:
                # The body of a scan may have been traced again.
                unknown = [None] * len(values)
                only = next(iter(inner.values())) if len(inner) == 1 else unknown
                return run(inner.get(id(body.jaxpr), only), body, values)

            return interpreter.bind_bodies(eqn, values, run_body)

        return interpreter.run(closed, values, evaluate)

    @functools.wraps(fun)
    def rounded_fun(*args: Any, **kwargs: Any) -> PyTree:
        closed, treedef = interpreter.trace(lambda *xs: fun(*xs, **kwargs), *args)
        leaves = jax.tree.leaves(args)
        number = len(jax.tree.leaves(args[:1]))
        origins = [*range(number), *[None] * (len(leaves) - number)]
        return jax.tree.unflatten(treedef, run(origins, closed, leaves))

    return rounded_fun


def _is_product(eqn: Any, largest_size: int) -> bool:
    if eqn.primitive.name not in primitives.PRODUCTS:
        return False
    dtypes = [v.aval.dtype for v in eqn.invars]
    return all(
        jnp.issubdtype(x, jnp.floating) and x.itemsize <= largest_size for x in dtypes
    )


def _product(
    eqn: Any, choice: Choice, values: list[Any], native: bool | None
) -> list[Any]:
    *axes, axis_of_result = _axes(eqn)
    operands = [
        _with_rounded_value(x, choice, axis)
        for x, axis in zip(values, axes, strict=True)
    ]
    is_dot = eqn.primitive.name == primitives.DOT_GENERAL
    can_be_native = is_dot and choice.format == "float8" and choice.is_rounded is None
    if can_be_native and (is_native() if native is None else native):
        result = _dot_general(eqn, *operands)
    else:
        (result,) = interpreter.bind(eqn, operands)
    rounded = _with_rounded_cotangent(
        choice.format, axis_of_result, choice.is_rounded, result
    )
    return [rounded]


def _axes(eqn: Any) -> tuple[int, ...]:
    """The axes of the operands and the result along which blocks follow each other.

    In an operand, it is an axis that is contracted.
    """
    numbers = eqn.params["dimension_numbers"]
    if eqn.primitive.name != primitives.DOT_GENERAL:
        return numbers.lhs_spec[1], numbers.rhs_spec[1], numbers.out_spec[1]
    contracted, _ = numbers
    return *(own[-1] if own else -1 for own in contracted), -1


def _with_rounded_value(x: jax.Array, choice: Choice, axis: int) -> jax.Array:
    """Rounds a value; gradients pass as if it had not been rounded."""
    form, constant = formats.FORMATS[choice.format], jax.lax.stop_gradient(x)
    rounded = formats.round_to(constant, form.operands, form.block, axis)
    return _if(choice.is_rounded, rounded, constant) + (x - constant)


def _if(is_rounded: jax.Array | None, rounded: jax.Array, x: jax.Array) -> jax.Array:
    return rounded if is_rounded is None else jnp.where(is_rounded > 0, rounded, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_rounded_cotangent(
    format: str, axis: int, is_rounded: Any, x: jax.Array
) -> jax.Array:
    del format, axis, is_rounded
    return x


def _round_cotangent(
    format: str, axis: int, is_rounded: Any, ct: jax.Array
) -> tuple[Any, jax.Array]:
    form = formats.FORMATS[format]
    no_gradient = None if is_rounded is None else jnp.zeros_like(is_rounded)
    if form.cotangents is None:
        return no_gradient, ct
    rounded = formats.round_to(
        ct, form.cotangents, form.block, axis, dithers=form.dithers
    )
    return no_gradient, _if(is_rounded, rounded, ct)


_with_rounded_cotangent.defvjp(
    lambda _, __, is_rounded, x: (x, is_rounded), _round_cotangent
)


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


def _dot_general(eqn: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Computes a dot product from 8-bit products that are summed in float32.

    The operands are rounded. The caller must round the cotangent of the result too,
    since the products of the gradient are also taken in 8 bits. XLA widens the operands
    on devices that cannot multiply 8-bit numbers. Infinity becomes NaN, since
    float8_e4m3fn has no infinity.
    """
    contracted, batch = eqn.params["dimension_numbers"]
    result = eqn.outvars[0].aval
    dtypes = jnp.dtype(result.dtype), x.dtype, y.dtype
    left, right = map(_ordered, (x, y), batch, contracted)
    return _product_in_8_bits(dtypes, left, right).reshape(result.shape)


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


class _Float8(NamedTuple):
    """Numbers of 8 bits, and the exponent of the power that they were multiplied by."""

    numbers: jax.Array
    exponent: jax.Array


def _to_float8(x: jax.Array, dtype: Any) -> _Float8:
    """Converts to 8 bits; this is exact for rounded arrays."""
    wide = x.astype(jnp.float32)
    exponent = formats.exponent_of(jnp.max(jnp.abs(wide), initial=0.0), dtype)
    largest = float(jnp.finfo(dtype).max)
    # A rounded array in float16 may have been rounded up once more.
    scaled = jnp.clip(wide * formats.power_of_two(exponent), -largest, largest)
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
    total *= formats.power_of_two(jnp.minimum(*exponents))
    total *= formats.power_of_two(jnp.maximum(*exponents))
    return total.astype(dtype)


def _forward(
    dtypes: tuple[Any, Any, Any], x: jax.Array, y: jax.Array
) -> tuple[jax.Array, Any]:
    left, right = (_to_float8(a, _FLOAT8.operands) for a in (x, y))
    return _contract(left, right, dtypes[0]), (left, right)


def _backward(
    dtypes: tuple[Any, Any, Any], operands: tuple[_Float8, _Float8], ct: jax.Array
) -> tuple[jax.Array, jax.Array]:
    cotangent = _to_float8(ct, _FLOAT8.cotangents)
    turned, left, right = (
        x._replace(numbers=jnp.swapaxes(x.numbers, -1, -2))
        for x in (cotangent, *operands)
    )
    _, left_dtype, right_dtype = dtypes
    return _contract(cotangent, right, left_dtype), _contract(turned, left, right_dtype)


def _undifferentiated(dtypes: tuple[Any, Any, Any], *xs: jax.Array) -> jax.Array:
    return _forward(dtypes, *xs)[0]


# A program shows a `jax.custom_vjp` under the name of its function.
_undifferentiated.__name__ = PRODUCT_NAME
_product_in_8_bits = jax.custom_vjp(_undifferentiated, nondiff_argnums=(0,))
_product_in_8_bits.defvjp(_forward, _backward)
