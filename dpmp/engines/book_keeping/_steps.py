"""Decisions for single equations: what each use caches, and how it is tapped.

A tap returns its argument unchanged, and makes the cotangent of its argument available:

- An equation with a rule (`_rules`) has a tap at its output.
- `_tap_dense` takes the gradient of one equation without a body, in float32. For sums
  and products, which are most of them, `_tap_elementwise` does the same.
- An identity tap takes the gradient of a view, in its dtype, through all equations that
  follow.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpmp.engines.book_keeping import _equations, _linalg, _rules, _uses, _views
from dpmp.engines.book_keeping._uses import Use
from dpmp.engines.book_keeping._views import View
from dpmp.numerics import at_least_float32
from dpmp.programs import interpreter, primitives

# A function of the values of an equation's operands, and for each use of a dummy and of
# whether its gradient is materialized. It returns the values of the outputs, and for
# each use the cached value or None.
Handler = Callable[
    [list[Any], list[jax.Array], list[bool]], tuple[list[Any], list[Any]]
]


class Step(NamedTuple):
    """The decision for one equation: its uses, and how to evaluate it."""

    uses: list[Use]
    handler: Handler


def _tappable(views: Sequence[View | None]) -> dict[int, View]:
    """The views that have a gradient, by their positions."""
    return {
        i: view
        for i, view in enumerate(views)
        if view is not None and view.leaves and _linalg.is_float(view.aval.dtype)
    }


def outer_step(eqn: Any, views: Sequence[View | None]) -> Step | None:
    """Caches the operand that meets a view, if the equation has a rule."""
    if (found := _rules.outer_use(eqn, views)) is None:
        return None
    use, operand = found

    def gradient(activation: Any, cotangent: jax.Array) -> jax.Array:
        cached = _uses.Cached(activation, cotangent)
        return _uses.gradient(use, cached).astype(_uses.dense(use).cotangent.dtype)

    def handler(values, dummies, materialized):
        (value,) = interpreter.bind(eqn, values)
        if materialized == [True]:
            return [_tap(gradient, value, values[operand], *dummies)], [None]
        return [_tap(_cotangent, value, None, *dummies)], [values[operand]]

    return Step([use], handler)


def _cotangent(_: None, cotangent: jax.Array) -> jax.Array:
    return cotangent


def dense_step(eqn: Any, views: list[View | None]) -> Step:
    to_views, uses = {}, []
    for i, view in _tappable(views).items():
        # The gradient of a broadcast array is a sum, taken in float32.
        to_views[i] = functools.partial(_views.sum_over_repeated, view)
        view = _views.before_broadcasts(view)
        dtype = at_least_float32(view.aval.dtype)
        cotangent = jax.ShapeDtypeStruct(view.aval.shape, dtype)
        uses.append(Use(eqn.primitive.name, view, cotangent))

    def handler(values, dummies, _):
        if len(uses) == 1 and eqn.primitive.name in (primitives.ADD, primitives.MUL):
            ((operand, to_view),) = to_views.items()
            outputs = _tap_elementwise(eqn, operand, to_view, values, *dummies)
        else:
            outputs = _tap_dense(eqn, to_views, values, dummies)
        return outputs, [None] * len(uses)

    return Step(uses, handler)


def identity_step(
    views: Sequence[View | None], fn: Callable[[list[Any]], list[Any]] = list
) -> Step:
    """Taps each view that has a gradient, then goes on with `fn`."""
    which = _tappable(views)
    uses = [
        Use("identity", x, jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype))
        for x in which.values()
    ]

    def handler(values, dummies, _):
        values = list(values)
        for i, dummy in zip(which, dummies, strict=True):
            values[i] = _tap(_cotangent, jnp.asarray(values[i]), None, dummy)
        return fn(values), [None] * len(uses)

    return Step(uses, handler)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tap(
    taken: Callable[[Any, jax.Array], jax.Array],
    value: jax.Array,
    cached: Any,
    dummy: jax.Array,
) -> jax.Array:
    """Returns `value`; the cotangent of `dummy` is `taken(cached, ct)`.

    Here, ct is the cotangent of the result. `cached` is an array or None.
    """
    del taken, cached, dummy
    return value


_tap.defvjp(
    lambda _, value, cached, __: (value, cached),
    lambda taken, cached, ct: (ct, None, taken(cached, ct)),
)


def _tap_elementwise(
    eqn: Any,
    operand: int,
    to_view: Callable[[jax.Array], jax.Array],
    values: Sequence[Any],
    dummy: jax.Array,
) -> list[jax.Array]:
    """Does for a sum or product what `_tap_dense` does, and is traced much faster.

    The view at the position `operand` is the only one.
    """
    shape, output = eqn.invars[operand].aval.shape, eqn.outvars[0].aval.shape
    repeated = [i for i, n in enumerate(output) if not shape or shape[i] != n]

    def taken(factor: Any, cotangent: jax.Array) -> jax.Array:
        grad = _linalg.widen(cotangent)
        if factor is not None:
            grad = _linalg.widen(factor) * grad
        return to_view(grad.sum(repeated).reshape(shape) if repeated else grad)

    (value,) = interpreter.bind(eqn, values)
    factor = values[1 - operand] if eqn.primitive.name == primitives.MUL else None
    return [_tap(taken, value, factor, dummy)]


def _tap_dense(
    eqn: Any,
    to_views: Mapping[int, Callable[[jax.Array], jax.Array]],
    values: Sequence[Any],
    dummies: Sequence[jax.Array],
) -> list[jax.Array]:
    """Evaluates an equation; gradients of its views become the cotangents of dummies.

    For the position of each operand that is a view, `to_views` has a function that maps
    the float32 gradient of this operand to the gradient of the use.
    """

    @jax.custom_vjp
    def met(values: list[Any], dummies: list[jax.Array]) -> list[Any]:
        del dummies
        return interpreter.bind(eqn, values)

    def forward(values: list[Any], dummies: list[jax.Array]) -> Any:
        return met(values, dummies), values

    def backward(values: list[Any], cotangents: list[Any]) -> Any:
        _, vjp_values = jax.vjp(lambda *xs: interpreter.bind(eqn, xs), *values)
        # Differentiate with respect to all operands: some rules of jax allow nothing
        # else.
        outputs, vjp_wide = jax.vjp(
            lambda *xs: _equations.bind_widened(eqn, xs), *map(_linalg.widen, values)
        )
        grads = vjp_wide(
            [
                ct.astype(x.dtype) if _linalg.is_float(x.dtype) else ct
                for ct, x in zip(cotangents, outputs, strict=True)
            ]
        )
        of_views = [to_view(grads[i]) for i, to_view in to_views.items()]
        return list(vjp_values(cotangents)), of_views

    met.defvjp(forward, backward)
    return met(list(values), list(dummies))
