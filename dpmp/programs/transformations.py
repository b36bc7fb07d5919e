"""Rewritings of a function's program that do not change its result."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.programs import primitives
from dpmp.programs.analysis import equations
from dpmp.programs.interpreter import bind, rewrite

# A convolution in many groups, each of few products, is faster as it is.
_FEW_PRODUCTS = 64


def _with_channels_last(eqn: Any, values: list[Any]) -> list[Any] | None:
    """Evaluates a convolution in the layout that XLA's CPU compiler computes fast.

    In this layout, the channels come last: (batch, *space, channels) for the input and
    the output, and (*space, input channels, output channels) for the kernel. The
    compiler changes other layouts to this one, but not inside of loops and branches.
    There, a convolution in another layout takes up to 60 times as long (jax 0.10).
    """
    given = eqn.params["dimension_numbers"]
    last = len(given.lhs_spec) - 1
    space = range(1, last)
    fast = type(given)(
        (0, last, *space), (last, last - 1, *range(last - 1)), (0, last, *space)
    )
    shape = eqn.invars[1].aval.shape
    products = math.prod(shape[i] for i in given.rhs_spec[1:])
    is_small = eqn.params["feature_group_count"] > 1 and products <= _FEW_PRODUCTS
    if given == fast or is_small:
        return None
    batch, channels, *rest = given.lhs_spec
    outputs, inputs, *window = given.rhs_spec
    made, features, *places = given.out_spec

    def in_fast_layout(x: jax.Array, kernel: jax.Array) -> jax.Array:
        x = x.transpose(batch, *rest, channels)
        kernel = kernel.transpose(*window, inputs, outputs)
        (result,) = bind(eqn, [x, kernel], dimension_numbers=fast)
        return result.transpose(np.argsort([made, *places, features]).tolist())

    def as_written(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return bind(eqn, [x, kernel])[0]

    return [jax.lax.platform_dependent(*values, cpu=in_fast_layout, default=as_written)]


FAST_CONVOLUTIONS = {primitives.CONVOLUTION: _with_channels_last}


def without_ragged_products(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns `fun` with ordinary products in place of `jax.lax.ragged_dot`.

    `jax.vmap` has no rule for products with ragged groups. The ordinary product
    multiplies each row by the matrices of all groups, and keeps the result of the row's
    own group. With k groups, it takes k times as long.
    """
    return rewrite(fun, {primitives.RAGGED_DOT: _ordinary_product})


def _ordinary_product(eqn: Any, values: list[Any]) -> list[jax.Array]:
    """Evaluates the equation of a ragged product; rows of no group become zero."""
    left, right, group_sizes = values
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracting, batch) = numbers.dot_dimension_numbers
    (row_axis,) = numbers.lhs_ragged_dimensions
    if row_axis in (*contracting[0], *batch[0]):
        _validate.fail(
            "groups of a ragged product must be groups of rows. Use "
            "jax.lax.ragged_dot, or one-hot groups and jnp.einsum.",
            lhs_ragged_dimensions=(row_axis,),
        )
    (group_axis,) = numbers.rhs_group_dimensions
    free_left = [i for i in range(left.ndim) if i not in (*contracting[0], *batch[0])]
    free_right = [i for i in range(right.ndim) if i not in (*contracting[1], *batch[1])]
    everything = jax.lax.dot_general(
        left,
        right,
        numbers.dot_dimension_numbers,
        precision=eqn.params["precision"],
        preferred_element_type=eqn.params["preferred_element_type"],
    )
    rows = len(batch[0]) + free_left.index(row_axis)
    groups = len(batch[0]) + len(free_left) + free_right.index(group_axis)
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(left.shape[row_axis])[:, None]
    is_own = (ends - group_sizes <= row) & (row < ends)  # (rows, groups)
    shape = [1] * everything.ndim
    shape[rows], shape[groups] = is_own.shape
    return [jnp.sum(everything, axis=groups, where=is_own.reshape(shape))]


class _Parts(NamedTuple):
    """A complex value as its real and its imaginary part; None is zero."""

    real: Any
    imag: Any


def has_complex_products(jaxpr: Any) -> bool:
    """Whether a program, or a program inside of it, has a product of complex arrays."""
    return any(map(_is_complex_product, equations(jaxpr)))


def without_complex_products(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns `fun` with real products in place of a complex one.

    This is done where the program computes one operand from its parts, as it does for
    complex weights whose parts are parameters. So data meet these parameters.
    """

    def rewritten(*args: Any) -> PyTree:
        # By `id`. The values stay alive here, so no id is used twice.
        known: dict[int, tuple[Any, _Parts]] = {}
        rule = functools.partial(_with_parts, known)
        return rewrite(fun, dict.fromkeys(_FOLLOWED, rule))(*args)

    return rewritten


def _with_parts(
    known: dict[int, tuple[Any, _Parts]], eqn: Any, values: list[Any]
) -> list[Any] | None:
    """Evaluates an equation whose result has known parts, and remembers them."""
    name = eqn.primitive.name
    if name in (primitives.REAL, primitives.IMAG) and id(values[0]) in known:
        part = getattr(known[id(values[0])][1], name)
        return None if part is None else [part]
    if not _is_complex(eqn.outvars[0].aval) or len(eqn.outvars) > 1:
        return None
    if (parts := _parts_of_result(known, eqn, values)) is None:
        return None
    shape = eqn.outvars[0].aval.shape  # a part may be that of a number
    parts = _Parts(*(None if x is None else jnp.broadcast_to(x, shape) for x in parts))
    if _is_complex_product(eqn):
        zeros = jnp.zeros(shape, _real_dtype(eqn))
        result = jax.lax.complex(*(zeros if x is None else x for x in parts))
    else:
        (result,) = bind(eqn, values)
    known[id(result)] = result, parts
    return [result]


def _parts_of_result(
    known: dict[int, tuple[Any, _Parts]], eqn: Any, values: list[Any]
) -> _Parts | None:
    name = eqn.primitive.name
    if name == primitives.COMPLEX:
        return _Parts(*values)
    if name == primitives.CAST and not _is_complex(eqn.invars[0].aval):
        return _Parts(jax.lax.convert_element_type(values[0], _real_dtype(eqn)), None)
    found = [
        _constant_parts(x) if id(x) not in known else known[id(x)][1] for x in values
    ]
    is_product = _is_complex_product(eqn) and any(found)
    parts = [
        _Parts(jnp.real(value), jnp.imag(value)) if x is None and is_product else x
        for x, value in zip(found, values, strict=True)
    ]
    some = [x for x in parts if x is not None]
    if not some or len(some) < len(parts):
        return None
    if is_product:
        changed = {"preferred_element_type": _real_dtype(eqn)}
        return _multiplied(lambda *xs: bind(eqn, xs, **changed)[0], *some)
    if name == primitives.MUL:
        return _multiplied(lambda *xs: bind(eqn, xs)[0], *some)
    if name in (primitives.ADD, primitives.SUB):
        return _Parts(*(_added(name, *x) for x in zip(*some, strict=True)))
    if name in _ON_PARTS:
        return _Parts(*(None if x is None else bind(eqn, [x])[0] for x in some[0]))
    return None


# Operations that act on the real and the imaginary part alone.
_ON_PARTS = (primitives.TRANSPOSE, primitives.RESHAPE, primitives.BROADCAST)
_ON_PARTS += (primitives.SQUEEZE, primitives.SLICE, primitives.REV)

# All operations that have a rule above.
_FOLLOWED = (primitives.COMPLEX, primitives.REAL, primitives.IMAG, primitives.CAST)
_FOLLOWED += (primitives.DOT_GENERAL, primitives.MUL, primitives.ADD, primitives.SUB)
_FOLLOWED += _ON_PARTS


def _constant_parts(x: Any) -> _Parts | None:
    """The parts of a number or array that is written in the program."""
    if isinstance(x, jax.core.Tracer):
        return None
    real, imag = np.real(x), np.imag(x)
    return _Parts(real if np.any(real) else None, imag if np.any(imag) else None)


def _multiplied(times: Callable[..., Any], a: _Parts, b: _Parts) -> _Parts:
    def product(x: Any, y: Any) -> Any:
        if x is None or y is None:
            return None
        return y if _is_one(x) else x if _is_one(y) else times(x, y)

    return _Parts(
        _added(primitives.SUB, product(a.real, b.real), product(a.imag, b.imag)),
        _added(primitives.ADD, product(a.real, b.imag), product(a.imag, b.real)),
    )


def _is_one(x: Any) -> bool:
    return not isinstance(x, jax.core.Tracer) and np.shape(x) == () and x == 1


def _added(name: str, a: Any, b: Any) -> Any:
    b = -b if name == primitives.SUB and b is not None else b
    return b if a is None else a if b is None else a + b


def _is_complex_product(eqn: Any) -> bool:
    is_product = eqn.primitive.name == primitives.DOT_GENERAL
    return is_product and _is_complex(eqn.outvars[0].aval)


def _is_complex(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.complexfloating)


def _real_dtype(eqn: Any) -> Any:
    return jnp.finfo(eqn.outvars[0].aval.dtype).dtype
