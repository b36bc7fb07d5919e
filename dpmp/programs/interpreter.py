"""Runs programs that jax has traced on values of any kind, and rewrites them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.extend.core
import jax.extend.source_info_util
import jax.numpy as jnp

from dpmp._typing import PyTree
from dpmp.programs import primitives

# Evaluates an equation on values; None leaves it as it is.
Rule = Callable[[Any, list[Any]], list[Any] | None]

# Returns the outputs of a closed jaxpr.
RunBody = Callable[[Any, Sequence[Any]], list[Any]]

CUSTOM_VJP = f"{primitives.CUSTOM_VJP} "


def trace(fun: Callable[..., PyTree], *example_args: Any) -> tuple[Any, Any]:
    """Traces a function to a closed jaxpr, and returns the tree of its output too.

    The jaxpr takes flat arguments. Calls under `jax.jit` are written out, except inside
    of loops, branches and custom derivatives. Index arithmetic on known numbers is
    evaluated, and of a condition on a known number the branch that it takes remains.
    """
    closed, out_shape = jax.make_jaxpr(fun, return_shape=True)(*example_args)
    return inline(closed), jax.tree.structure(out_shape)


def inline(closed: Any) -> Any:
    """Writes out the calls under `jax.jit` in a closed jaxpr."""
    return jax.make_jaxpr(functools.partial(_inlined, closed))(*closed.in_avals)


def _inlined(closed: Any, *args: Any) -> list[Any]:
    def evaluate(eqn: Any, values: list[Any]) -> list[Any]:
        if eqn.primitive.name in primitives.CALLS:
            return _inlined(callee(eqn), *values)
        if eqn.primitive.name == primitives.COND and _is_known(values[0]):
            branches = eqn.params["branches"]
            number = min(max(int(values[0]), 0), len(branches) - 1)
            return _inlined(branches[number], *values[1:])
        if _is_known_number(eqn, values):
            with jax.ensure_compile_time_eval():
                return bind(eqn, values)
        # The new equation gets the source line of the old one.
        with jax.extend.source_info_util.user_context(eqn.source_info.traceback):
            return bind(eqn, values)

    return run(closed, args, evaluate)


def callee(eqn: Any) -> Any:
    """Returns the closed jaxpr of a call."""
    return eqn.params["call_jaxpr" if "call_jaxpr" in eqn.params else "jaxpr"]


def _is_known_number(eqn: Any, values: list[Any]) -> bool:
    return (
        eqn.primitive.name in primitives.OF_INDICES
        and all(map(_is_known, values))
        and all(v.aval.shape == () for v in eqn.outvars)
    )


def _is_known(value: Any) -> bool:
    return not isinstance(value, jax.core.Tracer)


def run(closed: Any, args: Sequence[Any], evaluate: Rule) -> list[Any]:
    """Runs the equations of a closed jaxpr on values of any kind; returns the outputs.

    `evaluate(eqn, values)` returns the values of an equation's outputs, or None to
    evaluate the equation as it is. Constants and literals are passed unchanged.
    """
    jaxpr = closed.jaxpr
    env = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env |= zip(jaxpr.invars, args, strict=True)

    def read(atom: Any) -> Any:
        return atom.val if is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        results = evaluate(eqn, values)
        results = bind(eqn, values) if results is None else results
        env |= zip(eqn.outvars, results, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def bind(eqn: Any, values: Sequence[Any], **changed: Any) -> list[Any]:
    """Evaluates an equation, with some of its parameters changed."""
    params = {**eqn.primitive.get_bind_params(eqn.params), **changed}
    results = eqn.primitive.bind(*values, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def is_literal(atom: Any) -> bool:
    """Whether an operand is a literal, a number in the text of the program."""
    return isinstance(atom, jax.extend.core.Literal)


def variables_read(jaxpr: Any) -> list[list[Any]]:
    """The variables that each equation reads, and last those that are returned."""
    atoms = [*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars]
    return [[x for x in some if not is_literal(x)] for some in atoms]


def name(eqn: Any) -> str:
    """The name of the primitive, or `CUSTOM_VJP` and the name of the function."""
    if eqn.primitive.name != primitives.CUSTOM_VJP:
        return eqn.primitive.name
    body = eqn.params["call_jaxpr"]
    return CUSTOM_VJP + getattr(body, "jaxpr", body).debug_info.func_name


class Loop(NamedTuple):
    """A scan. Its body takes constants, then the carry, then slices of the rest.

    `body` is a closed jaxpr, and `options` are those of `jax.lax.scan`.
    """

    body: Any
    num_consts: int
    num_carry: int
    options: dict[str, Any]


def as_loop(eqn: Any) -> Loop | None:
    """Returns the parts of a scan, or None for another equation."""
    if eqn.primitive.name != primitives.SCAN:
        return None
    params = eqn.params
    num_consts, num_carry = counts_of_scan(params)
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


def counts_of_scan(params: dict[str, Any]) -> tuple[int, int]:
    """Returns the number of constants, and the number of carried operands."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # jax 0.12
    return len(list(consts)), len(list(carry))


def bind_bodies(eqn: Any, values: Sequence[Any], run_body: RunBody) -> list[Any]:
    """Evaluates an equation, but runs calls, loops and branches by `run_body`.

    All values have their dtypes in the program.
    """
    if eqn.primitive.name in primitives.CALLS:
        return run_body(callee(eqn), values)
    if eqn.primitive.name not in primitives.BODIES:
        return bind(eqn, values)
    if eqn.primitive.name == primitives.SCAN and _stacks_anything_twice(eqn):
        return _written_again(eqn, values, run_body)

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
    params = eqn.params
    if (loop := as_loop(eqn)) is not None:
        return run_loop(loop, values, run_body)
    if (found := as_rematerialised(eqn)) is not None:
        body, wrap = found
        return wrap(lambda *xs: run_body(body, xs))(*values)
    if eqn.primitive.name == primitives.WHILE:
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


def run_loop(loop: Loop, values: Sequence[Any], run_body: RunBody) -> list[Any]:
    """Evaluates a scan on arrays or trees, with one stack for outputs that agree."""
    values = [
        x
        if isinstance(x, jax.Array) or not jax.tree_util.all_leaves([x])
        else jnp.asarray(x, aval.dtype)
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


def rewrite(
    fun: Callable[..., PyTree], rules: Mapping[str, Rule]
) -> Callable[..., Any]:
    """Makes a function in which some equations are evaluated in another way.

    `rules` has a rule for each name of a primitive. `rule(eqn, values)` returns the
    values of an equation's outputs, in the same shapes and dtypes, or None to leave the
    equation as it is. Rules hold inside of loops and branches too. The result need not
    be differentiable.
    """

    def run_body(body: Any, values: Sequence[Any]) -> list[Any]:
        transposed: dict[Any, list[Any]] = {}

        def evaluate(eqn: Any, values: list[Any]) -> list[Any] | None:
            rule = rules.get(eqn.primitive.name)
            if rule and (results := rule(eqn, values)) is not None:
                return results
            if eqn.primitive.name in primitives.WITH_BODIES:
                return bind_bodies(eqn, values, run_body)
            if eqn.primitive.name != primitives.TRANSPOSE:
                return None
            # `jax.vmap` transposes each output again, though a loop stacks them once.
            # The values in `transposed` stay alive until the end of `run`, so no id is
            # used twice.
            key = id(values[0]), tuple(eqn.params["permutation"])
            if key not in transposed:
                transposed[key] = bind(eqn, values)
            return transposed[key]

        return run(body, values, evaluate)

    def rewritten(*args: Any) -> PyTree:
        closed, out_shape = jax.make_jaxpr(fun, return_shape=True)(*args)
        leaves = run_body(closed, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out_shape), leaves)

    return rewritten
