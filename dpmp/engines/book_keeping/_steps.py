"""Decisions for single equations: what each use caches, and how it is tapped."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpmp.engines.book_keeping import _linalg, _rules, _uses, _views
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


def tappable(views: Sequence[View | None]) -> dict[int, View]:
    """The views that have a gradient, by their positions."""
    return {
        i: view
        for i, view in enumerate(views)
        if view is not None and view.leaves and _linalg.is_float(view.aval.dtype)
    }


def outer_step(eqn: Any, use: Use, operand: int) -> Step:
    def gradient(activation: Any, cotangent: jax.Array) -> jax.Array:
        cached = _uses.Cached(activation, cotangent)
        return _uses.gradient(use, cached).astype(_uses.dense(use).cotangent.dtype)

    def handler(values, dummies, materialized):
        (value,) = interpreter.bind(eqn, values)
        if materialized == [True]:
            return [_rules.tap(gradient, value, values[operand], *dummies)], [None]
        return [_rules.tap(_cotangent, value, None, *dummies)], [values[operand]]

    return Step([use], handler)


def _cotangent(_: None, cotangent: jax.Array) -> jax.Array:
    return cotangent


def first_operand_step() -> Step:
    """Returns the first of several operands."""
    return Step([], lambda values, *_: (values[:1], []))


def dense_step(eqn: Any, views: list[View | None]) -> Step:
    to_views, uses = {}, []
    for i, view in tappable(views).items():
        # The gradient of a broadcast array is a sum, taken in float32.
        to_views[i] = functools.partial(_views.sum_over_repeated, view)
        view = _views.before_broadcasts(view)
        dtype = at_least_float32(view.aval.dtype)
        cotangent = jax.ShapeDtypeStruct(view.aval.shape, dtype)
        uses.append(Use(eqn.primitive.name, view, cotangent))

    def handler(values, dummies, _):
        if len(uses) == 1 and eqn.primitive.name in (primitives.ADD, primitives.MUL):
            ((operand, to_view),) = to_views.items()
            outputs = _rules.tap_elementwise(eqn, operand, to_view, values, *dummies)
        else:
            outputs = _rules.tap_dense(eqn, to_views, values, dummies)
        return outputs, [None] * len(uses)

    return Step(uses, handler)


def identity_step(
    views: Sequence[View | None], fn: Callable[[list[Any]], list[Any]] = list
) -> Step:
    """Taps each view that has a gradient, then goes on with `fn`."""
    which = tappable(views)
    uses = [
        Use("identity", x, jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype))
        for x in which.values()
    ]

    def handler(values, dummies, _):
        values = list(values)
        for i, dummy in zip(which, dummies, strict=True):
            values[i] = _rules.tap(_cotangent, jnp.asarray(values[i]), None, dummy)
        return fn(values), [None] * len(uses)

    return Step(uses, handler)
