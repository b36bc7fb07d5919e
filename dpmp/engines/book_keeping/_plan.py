"""Finds the sites in the program of one example's loss, and evaluates that program.

`make_plan` goes through the equations once. For each equation that has a view of
parameters among its operands, it decides how to evaluate it. `execute` evaluates these
equations as decided, and all others as they are. These two functions handle all control
flow:

    jax.jit, constants     written out (`_interpreter.inline`)
    scan                   stays a scan, with a plan of its own for the body
    jax.checkpoint         stays a checkpoint, with a plan of its own
    any other body         stays as it is; the views among its operands
                           are tapped whole
"""

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dpmp.engines.book_keeping import _rules, _sites, _views
from dpmp.engines.book_keeping._sites import Site
from dpmp.engines.book_keeping._views import View
from dpmp.numerics._stored import at_least_float32
from dpmp.programs import _bodies, _interpreter

# A function of the values of an equation's operands, and dummies. It returns the values
# of the outputs, and the recorded values.
Handler = Callable[[list[Any], list[jax.Array]], tuple[list[Any], list[Any]]]


@dataclass(frozen=True)
class _Step:
    """The decision for one equation: its sites, and how to evaluate it."""

    sites: list[Site]
    handler: Handler
    num_records: int


@dataclass(frozen=True)
class Plan:
    """A program, and decisions for the equations where data meets parameters.

    Attributes:
      closed: the closed jaxpr of the program.
      first: the decision for the arguments.
      steps: the decisions for equations, by the identity of the equation.
      last: the decision for the outputs, which may be views themselves.
    """

    closed: Any
    first: _Step
    steps: dict[int, _Step]
    last: _Step

    @property
    def num_records(self) -> int:
        """The number of recorded values."""
        return sum(step.num_records for step in self.steps.values())

    @property
    def sites(self) -> list[Site]:
        """The sites in the order of the program, in which records are numbered too."""
        sites, first_record = [], 0
        for step in (self.first, *self.steps.values(), self.last):
            sites += [_sites.in_call(x, x.view, first_record) for x in step.sites]
            first_record += step.num_records
        return sites


def make_plan(
    closed: Any,
    args: Sequence[View | None],
    *,
    tapped: Collection[int] = (),
    unread: Collection[int] = (),
) -> Plan:
    """Finds the sites of a program without calls under `jax.jit`.

    Args:
      closed: the closed jaxpr of the program.
      args: for each argument the view that it is, or None for data.
      tapped: the arguments to tap whole, before anything else reads them.
      unread: the outputs whose cotangents nobody reads.

    Returns:
      The plan.
    """
    steps = {}

    def evaluate(eqn: Any, operands: list[Any]) -> list[View | None]:
        views = [_as_view(x) for x in operands]
        known = [view for view in views if view is not None]
        if len(known) == len(views) and not _has_to_be_tapped(eqn, known):
            return list(_views.apply(eqn, known))
        outputs, step = _meet(eqn, views)
        if step is not None:
            steps[id(eqn)] = step
        return outputs

    first = _whole_step([x if i in tapped else None for i, x in enumerate(args)], list)
    inputs = [_DATA if x is None or i in tapped else x for i, x in enumerate(args)]
    outputs = [_as_view(x) for x in _interpreter.run(closed, inputs, evaluate)]
    read = [None if i in unread else view for i, view in enumerate(outputs)]
    return Plan(closed, first, steps, _whole_step(read, list))


def execute(
    plan: Plan, args: Sequence[Any], dummies: Sequence[jax.Array]
) -> tuple[list[Any], list[Any]]:
    """Evaluates a program as planned.

    Args:
      plan: the plan of the program.
      args: the values of the arguments.
      dummies: for each site a float array with the shape and dtype of its cotangent.
        The cotangent of this array comes out as the cotangent of the site.

    Returns:
      The outputs, and the recorded values.
    """
    remaining, records = iter(dummies), []

    def take(step: _Step, values: list[Any]) -> list[Any]:
        outputs, recorded = step.handler(values, [next(remaining) for _ in step.sites])
        records.extend(recorded)
        return outputs

    def evaluate(eqn: Any, values: list[Any]) -> list[Any]:
        step = plan.steps.get(id(eqn))
        return _interpreter.bind(eqn, values) if step is None else take(step, values)

    args = take(plan.first, list(args))
    outputs = take(plan.last, _interpreter.run(plan.closed, args, evaluate))
    return outputs, records


class _Data:
    """Stands for any value that depends on an example."""


_DATA = _Data()


def _as_view(x: Any) -> View | None:
    if isinstance(x, _Data):
        return None
    return x if isinstance(x, View) else _views.make_constant(x)


def _meet(eqn: Any, views: list[View | None]) -> tuple[list[Any], _Step | None]:
    """Returns the outputs of an equation on data and views, and the decision for it."""
    outputs: list[Any] = [_DATA] * len(eqn.outvars)
    has_gradient = any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars)
    if not has_gradient or not any(map(_is_tappable, views)):
        return outputs, None
    if any(_is_complex(v.aval) for v in (*eqn.invars, *eqn.outvars)):
        return outputs, _whole_step(views, functools.partial(_interpreter.bind, eqn))
    if (loop := _bodies.as_loop(eqn)) is not None and loop.options["length"] > 0:
        return _loop_step(loop, views)
    if (remat := _bodies.as_rematerialised(eqn)) is not None:
        return _call_step(*remat, views)
    if (rule := _rules.outer_rule(eqn, views)) is not None:
        return outputs, _outer_step(eqn, rule, views)
    if _bodies.has_body(eqn):
        return outputs, _whole_step(views, functools.partial(_interpreter.bind, eqn))
    return outputs, _dense_step(eqn, views)


def _is_tappable(view: View | None) -> bool:
    """Whether a value is a view that has a gradient."""
    return view is not None and bool(view.leaves) and _views.is_float(view.aval.dtype)


def _has_to_be_tapped(eqn: Any, views: Sequence[View]) -> bool:
    """Whether gradients of a whole batch cannot be sent back through an equation.

    This is so if the result may be complex, or if the gradient of a sum is not the sum
    of the gradients.
    """
    becomes_complex = any(_is_complex(v.aval) for v in eqn.outvars)
    is_exact = not becomes_complex and _views.goes_back_exactly(eqn)
    return not is_exact and any(map(_is_tappable, views))


def _is_complex(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.complexfloating)


def _outer_step(eqn: Any, rule: Any, views: list[View | None]) -> _Step:
    (output,) = eqn.outvars
    cotangent = jax.ShapeDtypeStruct(output.aval.shape, output.aval.dtype)
    view = views[rule.operand]
    assert view is not None

    def handler(values, dummies):
        (value,) = _interpreter.bind(eqn, values)
        return [_rules.tap(value, dummies[0])], [values[rule.record]]

    return _Step([Site(rule.name, view, (0,), cotangent, rule.outer)], handler, 1)


def _dense_step(eqn: Any, views: list[View | None]) -> _Step:
    operands, sites = [], []
    for i, view in enumerate(views):
        if view is None or not _is_tappable(view):
            continue
        if (broadcast := view.broadcast) is not None:
            (view,) = view.parents
        operands.append(_rules.Operand(i, view.aval.shape, broadcast))
        cotangent = jax.ShapeDtypeStruct(
            view.aval.shape, at_least_float32(view.aval.dtype)
        )
        sites.append(Site(eqn.primitive.name, view, (), cotangent, None))

    def handler(values, dummies):
        return _rules.tap_dense(eqn, operands, values, dummies), []

    return _Step(sites, handler, 0)


def _whole_step(
    views: Sequence[View | None], fn: Callable[[list[Any]], list[Any]]
) -> _Step:
    """Taps each view that has a gradient, then goes on with `fn`."""
    which = {
        i: view
        for i, view in enumerate(views)
        if view is not None and _is_tappable(view)
    }
    sites = [
        Site(
            "whole",
            view,
            (),
            jax.ShapeDtypeStruct(view.aval.shape, view.aval.dtype),
            None,
        )
        for view in which.values()
    ]

    def handler(values, dummies):
        values = list(values)
        for i, dummy in zip(which, dummies, strict=True):
            values[i] = _rules.tap(jnp.asarray(values[i]), dummy)
        return fn(values), []

    return _Step(sites, handler, 0)


def _call_step(
    body: Any, wrap: Callable[..., Any], views: list[View | None]
) -> tuple[list[Any], _Step]:
    """Plans a body that is evaluated once, under a wrapper that has to stay."""
    inner = make_plan(body, _inner_roots(views, [v.aval for v in body.jaxpr.invars]))
    outer = {i: view for i, view in enumerate(views) if view is not None}
    sites = [
        _sites.in_call(site, _views.lift(site.view, outer, set(), 0), 0)
        for site in inner.sites
    ]

    def handler(values, dummies):
        return wrap(lambda *args: execute(inner, *args))(values, dummies)

    return [_DATA] * len(body.jaxpr.outvars), _Step(sites, handler, inner.num_records)


def _inner_roots(views: Sequence[View | None], avals: Sequence[Any]) -> list[Any]:
    return [
        None if view is None else _views.make_root(i, aval, is_param=bool(view.leaves))
        for i, (view, aval) in enumerate(zip(views, avals, strict=True))
    ]


def _loop_step(loop: Any, views: list[View | None]) -> tuple[list[Any], _Step | None]:
    """Plans a scan of the same length and direction, with dummies in and records out.

    A carried value that the body returns unchanged counts as a constant of the body.
    Views among the other carried values are tapped whole, since the loop replaces them
    by data.
    """
    body, size = loop.body, loop.options["length"]
    carry = range(loop.num_consts, loop.num_consts + loop.num_carry)
    invariant = [
        i
        for i, output in zip(carry, body.jaxpr.outvars, strict=False)
        if output is body.jaxpr.invars[i]
    ]
    changing = [i for i in carry if i not in invariant]
    mapped = range(carry.stop, len(views))
    unread = [i - loop.num_consts for i in invariant]

    avals = [v.aval for v in body.jaxpr.invars]
    inside = [None if i in changing else view for i, view in enumerate(views)]
    inner = make_plan(body, _inner_roots(inside, avals), unread=unread)
    whole = _whole_step([views[i] for i in changing], list)

    outer = {i: view for i, view in enumerate(inside) if view is not None}
    sites, is_stacked = [], []
    for site in inner.sites:
        is_mapped = _views.depends_on(site.view, set(mapped))
        view = _views.lift(site.view, outer, set(mapped), size)
        sites.append(_sites.in_loop(site, view, 0, size, is_mapped=is_mapped))
        is_stacked.append(is_mapped or site.outer is not None)

    def handler(values, dummies):
        first, dummies = dummies[: len(whole.sites)], dummies[len(whole.sites) :]
        init, _ = whole.handler([values[i] for i in changing], first)
        stacked = [x for x, yes in zip(dummies, is_stacked, strict=True) if yes]

        def iteration(state, slices):
            inputs = dict(enumerate(values))
            inputs |= zip(changing, state, strict=True)
            inputs |= zip(mapped, slices[0], strict=True)
            of_one = iter(slices[1])
            one = [
                next(of_one) if yes else dummy
                for dummy, yes in zip(dummies, is_stacked, strict=True)
            ]
            args = [inputs[i] for i in range(len(values))]
            outputs, records = execute(inner, args, one)
            state = [outputs[i - loop.num_consts] for i in changing]
            return state, (outputs[loop.num_carry :], records)

        state, (ys, records) = jax.lax.scan(
            iteration, init, ([values[i] for i in mapped], stacked), **loop.options
        )
        final = dict(zip(changing, state, strict=True))
        return [*(final.get(i, values[i]) for i in carry), *ys], records

    outputs = [views[i] if i in invariant else _DATA for i in carry]
    outputs = [_DATA if x is None else x for x in outputs]
    outputs += [_DATA] * (len(body.jaxpr.outvars) - len(outputs))
    all_sites = [*whole.sites, *sites]
    if not all_sites:
        return outputs, None
    return outputs, _Step(all_sites, handler, inner.num_records)
