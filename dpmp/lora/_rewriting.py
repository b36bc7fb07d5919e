"""Runs a program in which some arrays are frozen, with their factors beside them."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.lora._operations import RULES
from dpmp.lora._paths import by_path
from dpmp.lora._views import CannotFollowError, Label, Target, View
from dpmp.programs import _bodies, _interpreter, _primitives
from dpmp.programs._source_lines import source_line


def with_views(
    leaves: Sequence[Any],
    params: PyTree,
    targets: dict[str, Target],
    factors: dict[str, tuple[Any, tuple[tuple[Label, ...], ...]]],
) -> list[Any]:
    """Replaces the leaves of the parameters that are targets by views of them.

    `leaves` has those of the parameters first. `factors` has the factors of a target,
    and the labels of their axes; without them, the use of the target is only watched.
    """
    views = list(leaves)
    for i, path in enumerate(by_path(params)):
        if path in targets:
            labels = tuple(Label((axis,)) for axis in range(leaves[i].ndim))
            views[i] = View(
                leaves[i], labels, *factors.get(path, ((), ())), targets[path]
            )
    return views


def check_used(targets: Iterable[Target]) -> None:
    """Raises ValueError unless the program has multiplied with every target."""
    unused = [target.path for target in targets if not target.is_used]
    _validate.require(
        not unused,
        "the function must multiply with every target, or its adapter never learns",
        unused=unused,
        fix="Leave these arrays out of `targets`.",
    )


def run(closed: Any, values: Sequence[Any]) -> list[Any]:
    """Returns the outputs of a closed jaxpr, of which some operands may be views.

    Raises:
      ValueError: if the program does something else with a view than to multiply with
        it. The message names the array, the operation and its line.
    """

    def evaluate(eqn: Any, values: list[Any]) -> list[Any]:
        views = [x for x in values if isinstance(x, View)]
        if not views:
            return _interpreter.bind(eqn, values)
        try:
            return _evaluate(eqn, values, views[0])
        except CannotFollowError as reason:
            _refuse(eqn, views[0], str(reason))

    outputs = _interpreter.run(closed, values, evaluate)
    for x in outputs:
        if isinstance(x, View):
            _refuse(None, x, "returns it")
    return outputs


def _evaluate(eqn: Any, values: list[Any], view: View) -> list[Any]:
    for of_bodies in (_scan, _rematerialised, _branches, _call):
        if (results := of_bodies(eqn, values)) is not None:
            return results
    if eqn.primitive.name == _primitives.CONVOLUTION:
        raise CannotFollowError("convolves with it")
    if eqn.primitive.name not in RULES:
        raise CannotFollowError("does something else with it than to multiply")
    return RULES[eqn.primitive.name](eqn, values, view)


def _scan(eqn: Any, values: list[Any]) -> list[Any] | None:
    if (loop := _bodies.as_loop(eqn)) is None:
        return None
    values = _as_arrays(values, eqn)
    consts = values[: loop.num_consts]
    carry = values[loop.num_consts : loop.num_consts + loop.num_carry]
    xs = values[loop.num_consts + loop.num_carry :]
    if any(isinstance(x, View) for x in carry):
        raise CannotFollowError("carries it from one iteration to the next")
    xs = [x.leading() if isinstance(x, View) else x for x in xs]

    def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        xs = [x.without_leading() if isinstance(x, View) else x for x in xs]
        outputs = run(loop.body, [*consts, *carry, *xs])
        return outputs[: loop.num_carry], outputs[loop.num_carry :]

    carry, ys = jax.lax.scan(body, carry, xs, **loop.options)
    return [*carry, *ys]


def _rematerialised(eqn: Any, values: list[Any]) -> list[Any] | None:
    if (found := _bodies.as_rematerialised(eqn)) is None:
        return None
    body, wrap = found
    return wrap(lambda *xs: run(body, xs))(*values)


def _branches(eqn: Any, values: list[Any]) -> list[Any] | None:
    if eqn.primitive.name != _primitives.COND:
        return None
    branches = [
        functools.partial(lambda body, *xs: run(body, xs), _interpreter.inline(x))
        for x in eqn.params["branches"]
    ]
    index, *operands = values
    return jax.lax.switch(index, branches, *operands)


def _call(eqn: Any, values: list[Any]) -> list[Any] | None:
    if eqn.primitive.name not in _primitives.CALLS:
        return None
    return run(_interpreter.callee(eqn), values)


def _as_arrays(values: list[Any], eqn: Any) -> list[Any]:
    """Gives numbers that are written in the program the dtypes that they have there."""
    return [
        x if isinstance(x, View | jax.Array) else jnp.asarray(x, atom.aval.dtype)
        for x, atom in zip(values, eqn.invars, strict=True)
    ]


def _refuse(eqn: Any, view: View, reason: str) -> NoReturn:
    operation, line = None, None
    if eqn is not None:
        operation = eqn.primitive.name
        line = ":".join(map(str, source_line(eqn, None)))
    _validate.fail(
        "every target of LoRA must be multiplied with, as a matrix or a stack of them",
        target=view.target.path,
        shape=view.array.shape,
        the_function=reason,
        operation=operation,
        line=line,
        fix="Leave this array out of `targets`." + _way_out(operation, view),
    )


def _way_out(operation: str | None, view: View) -> str:
    if operation == _primitives.CONVOLUTION:
        return (
            " The kernel of a convolution has no adapter: keep it frozen, or train all "
            "of it beside the adapters (docs/lora.md)."
        )
    was_watched = not view.factors  # by lora.init, which was given the function
    return (
        ""
        if was_watched
        else " If it has more than two axes, pass `fun` and `example_args` to "
        "lora.init, which reads their use."
    )
