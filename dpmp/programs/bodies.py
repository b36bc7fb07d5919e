"""Programs inside of a program: calls, loops, branches, rematerialised parts."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from dpmp.programs import primitives
from dpmp.programs.interpreter import bind, callee, inline, is_literal

# Returns the outputs of a closed jaxpr.
RunBody = Callable[[Any, Sequence[Any]], list[Any]]


class Loop(NamedTuple):
    """A scan. Its body takes constants, then the carry, then slices of the rest.

    `body` is a closed jaxpr, and `options` are those of `jax.lax.scan`.
    """

    body: Any
    num_consts: int
    num_carry: int
    options: dict[str, Any]


class SubProgram(NamedTuple):
    """A program that an equation runs.

    `invars` has for each of its arguments the operand of the equation, or None if it is
    unknown. `num_consts` and `num_carry` are those of a `Loop`, and 0 for others.
    `length` is the number of iterations, or None if it depends on data. `has_results`
    tells whether the results of the program are those of the equation.
    """

    jaxpr: Any
    invars: Sequence[Any]
    num_consts: int = 0
    num_carry: int = 0
    length: int | None = 1
    has_results: bool = True


def has_body(eqn: Any) -> bool:
    """Whether an equation runs programs of its own: a loop, a branch, a custom rule."""
    return any(
        callable(part) or hasattr(getattr(part, "jaxpr", part), "eqns")
        for part in _parts_of(eqn.params)
        if not isinstance(part, type)
    )


def as_loop(eqn: Any) -> Loop | None:
    """Returns the parts of a scan, or None for another equation."""
    if eqn.primitive.name != primitives.SCAN:
        return None
    params = eqn.params
    num_consts, num_carry = _counts_of_scan(params)
    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    return Loop(inline(params["jaxpr"]), num_consts, num_carry, options)


def as_rematerialised(eqn: Any) -> tuple[Any, Callable[..., Any]] | None:
    """Returns the closed body of a `jax.checkpoint`, and the wrapper to apply again."""
    if eqn.primitive.name not in primitives.REMATERIALISED:
        return None
    body = jax.extend.core.ClosedJaxpr(eqn.params["jaxpr"], ())
    options = {name: eqn.params[name] for name in ("policy", "prevent_cse")}
    return inline(body), functools.partial(jax.checkpoint, **options)


def as_branches(eqn: Any) -> list[Any] | None:
    """Returns the closed branches of a condition, or None for another equation.

    The branches for platforms remain: a platform may be unable to compile the others.
    """
    if eqn.primitive.name != primitives.COND or eqn.params.get("branches_platforms"):
        return None
    return list(map(inline, eqn.params["branches"]))


def sub_programs(eqn: Any) -> list[SubProgram]:
    """Lists the programs that an equation runs, without tracing them again."""
    params, operands = eqn.params, list(eqn.invars)
    if eqn.primitive.name == primitives.SCAN:
        jaxpr, counts = params["jaxpr"].jaxpr, _counts_of_scan(params)
        return [SubProgram(jaxpr, operands, *counts, params["length"])]
    if eqn.primitive.name == primitives.WHILE:
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        cond, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
        carry = operands[num_cond + num_body :]
        inputs = operands[:num_cond] + carry
        return [
            SubProgram(cond, inputs, num_cond, len(carry), None, has_results=False),
            SubProgram(body, operands[num_cond:], num_body, len(carry), None),
        ]
    given = operands[1:] if eqn.primitive.name == primitives.COND else operands
    return [
        SubProgram(
            jaxpr,
            given if len(jaxpr.invars) == len(given) else [None] * len(jaxpr.invars),
            has_results=len(jaxpr.outvars) == len(eqn.outvars),
        )
        for jaxpr in (getattr(part, "jaxpr", part) for part in _parts_of(params))
        if hasattr(jaxpr, "eqns")
    ]


def programs_in(jaxpr: Any) -> list[Any]:
    """Lists a jaxpr, and the jaxprs of all programs in it."""
    inside = (programs_in(x.jaxpr) for eqn in jaxpr.eqns for x in sub_programs(eqn))
    return [jaxpr, *itertools.chain(*inside)]


def equations(jaxpr: Any) -> list[Any]:
    """Lists the equations of a jaxpr, and those of all programs in it."""
    return list(itertools.chain(*(x.eqns for x in programs_in(jaxpr))))


def has_primitive(jaxpr: Any, name: str) -> bool:
    """Whether a jaxpr, or a program in it, has an equation of a primitive."""
    return any(eqn.primitive.name == name for eqn in equations(jaxpr))


def arrays_in(jaxpr: Any) -> list[Any]:
    """Lists the arrays that stand in a jaxpr, and in the programs in it, as literals.

    jax puts arrays there with the option `jax_use_simplified_jaxpr_constants`. They are
    hidden arguments of the compiled program, which its text does not show.
    """
    atoms = (
        atom
        for program in programs_in(jaxpr)
        for some in (*(eqn.invars for eqn in program.eqns), program.outvars)
        for atom in some
    )
    return [x.val for x in atoms if np.ndim(getattr(x, "val", 0))]


def _counts_of_scan(params: dict[str, Any]) -> tuple[int, int]:
    """Returns the number of constants, and the number of carried operands."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # jax 0.12
    return len(list(consts)), len(list(carry))


def _parts_of(params: dict[str, Any]) -> list[Any]:
    return jax.tree.leaves(params, is_leaf=callable)


def bind_bodies(eqn: Any, values: Sequence[Any], run_body: RunBody) -> list[Any]:
    """Evaluates an equation, but runs calls, loops and branches by `run_body`.

    All values have their dtypes in the program.
    """
    if eqn.primitive.name in primitives.CALLS:
        return run_body(callee(eqn), values)
    if eqn.primitive.name not in primitives.BODIES:
        return bind(eqn, values)
    if eqn.primitive.name == primitives.SCAN and _stacks_anything_twice(eqn):
        return _stack_once(eqn, values, run_body)

    has_constants = []

    def rewritten(body: Any) -> Any:
        is_closed = isinstance(body, jax.extend.core.ClosedJaxpr)
        closed = body if is_closed else jax.extend.core.ClosedJaxpr(body, ())
        new = jax.make_jaxpr(lambda *xs: run_body(closed, xs))(*closed.in_avals)
        has_constants.extend(new.consts)
        return new if is_closed else new.jaxpr

    bodies = {name: eqn.params[name] for name in primitives.BODIES[eqn.primitive.name]}
    new_bodies = jax.tree.map(rewritten, bodies)
    if has_constants:  # which the equation cannot hold
        return _written_again(eqn, values, run_body)
    return bind(eqn, values, **new_bodies)


def _written_again(eqn: Any, values: Sequence[Any], run_body: RunBody) -> list[Any]:
    """Evaluates a loop or a branch whose new bodies close over arrays."""
    name, params = eqn.primitive.name, eqn.params
    if name == primitives.SCAN:
        return _stack_once(eqn, values, run_body)
    if (found := as_rematerialised(eqn)) is not None:
        body, wrap = found
        return wrap(lambda *xs: run_body(body, xs))(*values)
    if name == primitives.WHILE:
        ends = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        of_cond, of_body = values[: ends[0]], values[ends[0] : ends[1]]
        return jax.lax.while_loop(
            lambda carry: run_body(params["cond_jaxpr"], [*of_cond, *carry])[0],
            lambda carry: run_body(params["body_jaxpr"], [*of_body, *carry]),
            [*values[ends[1] :]],
        )
    if params.get("branches_platforms"):  # a platform cannot compile other branches
        return bind(eqn, values)

    def as_function(branch: Any) -> Callable[..., list[Any]]:
        return lambda *xs: run_body(branch, xs)

    branches = list(map(as_function, params["branches"]))
    return jax.lax.switch(values[0], branches, *values[1:])


def _stacks_anything_twice(eqn: Any) -> bool:
    """Whether a scan stacks the same values more than once, in separate copies."""
    variables = [v for v in eqn.params["jaxpr"].jaxpr.outvars if not is_literal(v)]
    return len(set(variables)) < len(variables)


def _stack_once(eqn: Any, values: Sequence[Any], run_body: RunBody) -> list[Any]:
    """Evaluates a scan with one stack for outputs that are the same."""
    loop = as_loop(eqn)
    assert loop is not None
    values = [
        x if isinstance(x, jax.Array) else jnp.asarray(x, aval.dtype)
        for x, aval in zip(values, loop.body.in_avals, strict=True)
    ]
    consts = values[: loop.num_consts]
    carry = values[loop.num_consts : loop.num_consts + loop.num_carry]
    stacked = loop.body.jaxpr.outvars[loop.num_carry :]
    # An output may occur more than once.
    names = [id(atom) if is_literal(atom) else atom for atom in stacked]
    kept = sorted(map(names.index, set(names)))

    def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs = run_body(loop.body, [*consts, *carry, *xs])
        ys = outputs[loop.num_carry :]
        return outputs[: loop.num_carry], [ys[i] for i in kept]

    xs = values[loop.num_consts + loop.num_carry :]
    carry, ys = jax.lax.scan(body, carry, xs, **loop.options)
    by_name = {names[i]: y for i, y in zip(kept, ys, strict=True)}
    return [*carry, *map(by_name.__getitem__, names)]
