"""Writes products of complex numbers as products of their real and imaginary parts."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from dpmp._typing import PyTree
from dpmp.programs import primitives
from dpmp.programs.bodies import equations
from dpmp.programs.interpreter import bind
from dpmp.programs.transformations import rewrite


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
        return rewrite(fun, dict.fromkeys(_RULES, rule))(*args)

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
_RULES = (primitives.COMPLEX, primitives.REAL, primitives.IMAG, primitives.CAST)
_RULES += (primitives.DOT_GENERAL, primitives.MUL, primitives.ADD, primitives.SUB)
_RULES += _ON_PARTS


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
