"""Finds the uses in the program of one example's loss, and evaluates that program.

`make_plan` decides how to evaluate each equation that has a view of parameters among
its operands. `execute` evaluates these equations as decided, and all others as they
are. These two functions handle all control flow: `jax.jit` and branches that known
numbers choose are written out (`interpreter.inline`). Scans, checkpoints and branches
that data choose stay what they are, with plans of their own. Any other body stays as it
is, and the views among its operands get an identity tap.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dpmp.engines.book_keeping import _equations, _steps, _uses, _views
from dpmp.engines.book_keeping._steps import Step
from dpmp.engines.book_keeping._uses import Use
from dpmp.engines.book_keeping._views import View
from dpmp.programs import analysis, frozen, interpreter, primitives


@dataclass(frozen=True)
class Plan:
    """A program, and decisions for the places where data meets parameters.

    `first` is the decision for the arguments, `steps` has those for equations, by their
    `id`, and `last` is the decision for the outputs. `returned` has the outputs that
    are views for the program outside as well, by their numbers.
    """

    closed: Any
    first: Step
    steps: dict[int, Step]
    last: Step
    returned: dict[int, View]

    @property
    def uses(self) -> list[Use]:
        """The uses in the order of the program."""
        steps = self.first, *self.steps.values(), self.last
        return [use for step in steps for use in step.uses]


def make_plan(
    closed: Any,
    args: Sequence[View | None],
    *,
    tapped: Collection[int] = (),
    unread: Collection[int] = (),
    stays_view: Callable[[int, View], bool] = lambda output, view: False,
) -> Plan:
    """Finds the uses of a closed jaxpr without calls under `jax.jit`.

    Args:
      closed: the closed jaxpr.
      args: for each argument the view that it is, or None for data.
      tapped: the arguments that get an identity tap, before anything reads them.
      unread: the outputs whose cotangents nobody reads.
      stays_view: tells of an output that is a view whether it is a view for the program
        outside as well. It gets no tap here, but where the program outside uses it.
    """
    steps: dict[int, Step] = {}
    reached = analysis.reached(closed.jaxpr, unread)

    def evaluate(eqn: Any, operands: list[Any]) -> list[Any]:
        if eqn.primitive.name in primitives.IDENTITIES:
            return operands
        is_custom = eqn.primitive.name in primitives.CUSTOM
        if is_custom and frozen.reads_instead(eqn) and _as_view(operands[1]):
            steps[id(eqn)] = Step([], lambda values, *_: (values[:1], []))
            return operands[1:]
        views = list(map(_as_view, operands))
        known = [view for view in views if view is not None]
        if len(known) == len(views):
            as_of_data = [*views[:1], None]
            if _views.repeats_rows(eqn, known) and _steps.outer_step(eqn, as_of_data):
                views = as_of_data
            elif not _has_to_be_tapped(eqn, known):
                return _views.apply(eqn, known)
        dead = [i for i, v in enumerate(eqn.outvars) if v not in reached]
        if len(dead) == len(eqn.outvars):
            return [_DATA] * len(eqn.outvars)
        outputs, step = _meet(eqn, views, dead)
        if step is not None:
            steps[id(eqn)] = step
        return outputs

    first = _steps.identity_step(
        [x if i in tapped else None for i, x in enumerate(args)]
    )
    inputs = [_DATA if x is None or i in tapped else x for i, x in enumerate(args)]
    outputs = [_as_view(x) for x in interpreter.run(closed, inputs, evaluate)]
    returned = {
        i: x for i, x in enumerate(outputs) if x is not None and stays_view(i, x)
    }
    untapped = {*unread, *returned}
    last = _steps.identity_step(
        [None if i in untapped else x for i, x in enumerate(outputs)]
    )
    return Plan(closed, first, steps, last, returned)


def execute(
    plan: Plan,
    args: Sequence[Any],
    dummies: list[jax.Array],
    materialized: list[bool],
) -> tuple[list[Any], list[Any]]:
    """Runs a program as planned: it is the `Handler` of all its uses.

    The dummies are float arrays with the shapes and dtypes of the cotangents of the
    uses. Differentiation gives each dummy the cotangent, or the gradient.
    """
    activations: list[Any] = []

    def take(step: Step, values: list[Any]) -> list[Any]:
        mine = slice(len(activations), len(activations) + len(step.uses))
        outputs, cached = step.handler(values, dummies[mine], materialized[mine])
        activations.extend(cached)
        return outputs

    def evaluate(eqn: Any, values: list[Any]) -> list[Any] | None:
        step = plan.steps.get(id(eqn))
        return None if step is None else take(step, values)

    args = take(plan.first, list(args))
    outputs = take(plan.last, interpreter.run(plan.closed, args, evaluate))
    return outputs, activations


_DATA = object()  # stands for any value that depends on an example


def _as_view(x: Any) -> View | None:
    if x is _DATA:
        return None
    return x if isinstance(x, View) else _views.make_constant(x)


def _meet(
    eqn: Any, views: list[View | None], unread: Collection[int]
) -> tuple[list[Any], Step | None]:
    """Returns the outputs of an equation on data and views, and the decision for it."""
    outputs: list[Any] = [_DATA] * len(eqn.outvars)
    identity = _steps.identity_step(views, functools.partial(interpreter.bind, eqn))
    if not identity.uses:
        return outputs, None
    if any(_is_complex(v) for v in (*eqn.invars, *eqn.outvars)):
        return outputs, identity
    if (loop := interpreter.as_loop(eqn)) is not None and loop.options["length"] > 0:
        return _loop_step(loop, views, unread)
    if (remat := interpreter.as_rematerialised(eqn)) is not None:
        return _call_step(*remat, views, unread)
    if (branches := interpreter.as_branches(eqn)) is not None:
        return outputs, _branches_step(branches, views, unread, identity)
    if (step := _steps.outer_step(eqn, views)) is not None:
        return outputs, step
    if analysis.has_body(eqn):
        return outputs, identity
    return outputs, _steps.dense_step(eqn, views)


def _has_to_be_tapped(eqn: Any, views: Sequence[View]) -> bool:
    """Whether gradients of a whole batch cannot be sent back through an equation.

    This is so if the result may be complex, or if the gradient of a sum is not the sum
    of the gradients.
    """
    is_exact = not any(map(_is_complex, eqn.outvars)) and _equations.goes_back_exactly(
        eqn
    )
    return not is_exact and bool(_steps.identity_step(views).uses)


def _is_complex(atom: Any) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jnp.complexfloating)


def _call_step(
    body: Any,
    wrap: Callable[..., Any],
    views: Sequence[View | None],
    unread: Collection[int],
) -> tuple[list[Any], Step]:
    """Plans a body that is evaluated once, inside the wrapper `wrap`."""
    inner = make_plan(
        body,
        _inner_roots(views, body),
        unread=unread,
        stays_view=lambda _, view: bool(view.roots),
    )
    outputs: list[Any] = [_DATA] * len(body.out_avals)
    for i, view in inner.returned.items():
        outputs[i] = _views.outside(view, views)
    uses = _uses_outside(inner, views)

    def handler(values, dummies, materialized):
        run = functools.partial(execute, inner, materialized=materialized)
        return wrap(run)(values, dummies)

    return outputs, Step(uses, handler)


def _uses_outside(inner: Plan, views: Sequence[View | None]) -> list[Use]:
    """The uses of a body, with views of its operands."""
    return [
        dataclasses.replace(use, view=_views.outside(use.view, views))
        for use in inner.uses
    ]


def _branches_step(
    branches: Sequence[Any],
    views: list[View | None],
    unread: Collection[int],
    identity: Step,
) -> Step:
    """Plans branches, as other branches that take all dummies and return activations.

    Where a branch is not taken, the activations and cotangents of its uses are zero.
    If the cached arrays take more memory than the gradients, it is the step `identity`.
    """
    operands = views[1:]
    plans = [make_plan(x, _inner_roots(operands, x), unread=unread) for x in branches]
    uses = [use for plan in plans for use in _uses_outside(plan, operands)]
    ends = list(itertools.accumulate((len(x.uses) for x in plans), initial=0))
    if _uses.num_bytes(uses) > _uses.num_bytes(identity.uses):
        return identity

    def handler(values, dummies, materialized):
        zeros = [
            None if x.outer is None or early else _zeros(x.outer.activation)
            for x, early in zip(uses, materialized, strict=True)
        ]

        def run(plan: Plan, start: int, end: int, values, dummies):
            outputs, cached = execute(
                plan, values, dummies[start:end], materialized[start:end]
            )
            outputs = map(
                jnp.asarray, outputs, (x.dtype for x in plan.closed.out_avals)
            )
            return list(outputs), [*zeros[:start], *cached, *zeros[end:]]

        runs = map(functools.partial, [run] * len(plans), plans, ends, ends[1:])
        return jax.lax.switch(values[0], list(runs), values[1:], dummies)

    return Step(uses, handler)


def _zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(x.shape, x.dtype)


def _inner_roots(views: Sequence[View | None], body: Any) -> list[View | None]:
    return [
        None if x is None else _views.make_root(i, v.aval, is_param=bool(x.leaves))
        for i, (x, v) in enumerate(zip(views, body.jaxpr.invars, strict=True))
    ]


def _loop_step(
    loop: interpreter.Loop, views: list[View | None], unread: Collection[int]
) -> tuple[list[Any], Step | None]:
    """Plans a scan, as another scan that takes dummies and returns activations.

    A carried value that the body returns unchanged is a constant of the body. Other
    carried views get an identity tap, since the loop replaces them by data.
    """
    body, size = loop.body.jaxpr, loop.options["length"]
    carry = range(loop.num_consts, loop.num_consts + loop.num_carry)
    changing = [i for i in carry if body.outvars[i - carry.start] is not body.invars[i]]
    constant = [i - carry.start for i in carry if i not in changing]
    mapped = range(carry.stop, len(views))

    inside = [None if i in changing else view for i, view in enumerate(views)]
    inner = make_plan(
        loop.body,
        _inner_roots(inside, loop.body),
        unread={*analysis.unread_in_loop(loop, unread), *constant},
        # Other outputs are carried, or are copies of what every iteration returns.
        stays_view=lambda i, view: (
            i >= loop.num_carry and not view.roots.isdisjoint(mapped)
        ),
    )
    carried = _steps.identity_step([views[i] for i in changing])
    uses, stacked = [], set[int]()
    for number, use in enumerate(inner.uses):
        is_mapped = not use.view.roots.isdisjoint(mapped)
        view = _views.outside(use.view, inside, mapped, size)
        uses.append(_uses.in_loop(use, view, size, is_mapped=is_mapped))
        stacked |= {number} if is_mapped or use.outer is not None else set()
    start = len(carried.uses)

    def handler(values, dummies, materialized):
        of_carry = [values[i] for i in changing]
        init, nothing = carried.handler(of_carry, dummies[:start], materialized[:start])
        dummies = dummies[start:]

        def iteration(state, slices):
            inputs = state | slices[0]
            outputs, activations = execute(
                inner,
                [inputs.get(i, x) for i, x in enumerate(values)],
                [slices[1].get(i, x) for i, x in enumerate(dummies)],
                materialized[start:],
            )
            state = {i: outputs[i - carry.start] for i in changing}
            return state, (outputs[loop.num_carry :], activations)

        final, (ys, activations) = jax.lax.scan(
            iteration,
            dict(zip(changing, init, strict=True)),
            ({i: values[i] for i in mapped}, {i: dummies[i] for i in stacked}),
            **loop.options,
        )
        outputs = [*(final.get(i, values[i]) for i in carry), *ys]
        return outputs, [*nothing, *activations]

    outputs = [_DATA if inside[i] is None else views[i] for i in carry]
    outputs += [_DATA] * (len(body.outvars) - len(outputs))
    for i, view in inner.returned.items():
        outputs[i] = _views.outside(view, inside, mapped, size)
    uses = [*carried.uses, *uses]
    return outputs, Step(uses, handler) if uses else None
