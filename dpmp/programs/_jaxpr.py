"""The one file that knows how jax writes down programs."""

import functools
import os
import sysconfig
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.extend.core
import jax.numpy as jnp

from dpmp._typing import PyTree

_CALLS = ("jit", "pjit", "closed_call")
_REMATERIALISED = ("remat2", "checkpoint", "remat")
_BODIES = {
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    **dict.fromkeys(_REMATERIALISED, ("jaxpr",)),
}
_CUSTOM_VJP = "custom_vjp_call"
CUSTOM_VJP = f"{_CUSTOM_VJP} "
_SCALAR_ARITHMETIC = ("add", "sub", "mul", "lt", "ge", "select_n")
_SCALAR_ARITHMETIC += ("convert_element_type",)


class Loop(NamedTuple):
    """A scan: its body takes constants, then the carry, then a slice of the rest.

    Attributes:
      body: closed jaxpr.
      num_consts: how many operands every iteration sees as they are.
      num_carry: how many are carried on.
      options: of `jax.lax.scan`.
    """

    body: Any
    num_consts: int
    num_carry: int
    options: dict[str, Any]


def trace(fun: Callable[..., PyTree], *example_args: Any) -> tuple[Any, Any]:
    """A function as a closed jaxpr of flat arguments, and the tree of its output.

    Calls under `jax.jit` are written out, but for those inside of loops, branches and
    custom derivatives. Index arithmetic on numbers that are known is done.
    """
    closed, out_shape = jax.make_jaxpr(fun, return_shape=True)(*example_args)
    return inline(closed), jax.tree.structure(out_shape)


def inline(closed: Any) -> Any:
    """The closed jaxpr with calls under `jax.jit` written out."""
    return jax.make_jaxpr(functools.partial(_inlined, closed))(*closed.in_avals)


def _inlined(closed: Any, *args: Any) -> list[Any]:
    def evaluate(eqn: Any, values: list[Any]) -> list[Any]:
        if eqn.primitive.name in _CALLS:
            return _inlined(_callee(eqn), *values)
        if _is_known_number(eqn, values):
            with jax.ensure_compile_time_eval():
                return bind(eqn, values)
        return bind(eqn, values)

    return run(closed, args, evaluate)


def _callee(eqn: Any) -> Any:
    """The closed jaxpr of a call."""
    return eqn.params["call_jaxpr" if "call_jaxpr" in eqn.params else "jaxpr"]


def _is_known_number(eqn: Any, values: list[Any]) -> bool:
    return (
        eqn.primitive.name in _SCALAR_ARITHMETIC
        and not any(isinstance(x, jax.core.Tracer) for x in values)
        and all(v.aval.shape == () for v in eqn.outvars)
    )


def hoist_constants(
    fun: Callable[..., PyTree], *example_args: Any
) -> tuple[Callable[..., PyTree], list[Any]]:
    """Turns the arrays that `fun` closes over into an argument.

    Compiled as they are, such arrays become part of the program: a frozen model of a
    few gigabytes would be copied into it, and compiled again for every change. Arrays
    that functions under `jax.jit` close over are found as well. What stays in the
    program is closed over by the rules of a custom derivative, or by a function under
    `jax.jit` inside of a loop or a branch.

    Args:
      fun: a traceable function.
      *example_args: arguments, or `jax.ShapeDtypeStruct`s, of the only shapes and
        dtypes that the result will accept.

    Returns:
      `hoisted(constants, *args)` and `constants`.
    """
    closed, out_treedef = trace(fun, *example_args)

    def hoisted(constants: list[Any], *args: Any) -> PyTree:
        same = jax.extend.core.ClosedJaxpr(closed.jaxpr, constants)
        leaves = jax.extend.core.jaxpr_as_fun(same)(*jax.tree.leaves(args))
        return jax.tree.unflatten(out_treedef, leaves)

    return hoisted, list(closed.consts)


def rewrite(
    fun: Callable[..., PyTree],
    replace: Callable[[Any, list[Any]], list[Any] | None],
) -> Callable[..., PyTree]:
    """A function some of whose equations are evaluated in another way.

    Args:
      fun: a traceable function that need not be differentiated any more.
      replace: `replace(eqn, values)` gives the values of an equation's outputs, of the
        shapes and dtypes that they had, or None to leave it as it is. It is asked about
        the equations inside of loops and branches too.

    Returns:
      A function of the same arguments.
    """

    def run_body(body: Any, values: Sequence[Any]) -> list[Any]:
        transposed: dict[Any, list[Any]] = {}

        def evaluate(eqn: Any, values: list[Any]) -> list[Any]:
            if (results := replace(eqn, values)) is not None:
                return results
            if eqn.primitive.name != "transpose":
                return bind_bodies(eqn, values, run_body)
            # `jax.vmap` does so for each output, though a loop stacks them once. What
            # can be read again is alive until the end of `run`, and its id its own.
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


def run(
    closed: Any, args: Sequence[Any], evaluate: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """Goes through the equations of a closed jaxpr, in any interpretation of values.

    Args:
      closed: closed jaxpr.
      args: the values of its arguments.
      evaluate: `evaluate(eqn, values)` gives the values of an equation's outputs.
        Constants and literals come as they are.

    Returns:
      The values of the outputs.
    """
    jaxpr = closed.jaxpr
    env = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env |= zip(jaxpr.invars, args, strict=True)

    def read(atom: Any) -> Any:
        return atom.val if is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        results = evaluate(eqn, [read(atom) for atom in eqn.invars])
        env |= zip(eqn.outvars, results, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def bind_bodies(
    eqn: Any,
    values: Sequence[Any],
    run_body: Callable[[Any, Sequence[Any]], list[Any]],
) -> list[Any]:
    """Evaluates an equation, running calls, loops and branches in another way.

    Args:
      eqn: any equation.
      values: of its operands, in the dtypes that they have in the program.
      run_body: `run_body(closed, values)` gives the outputs of a closed jaxpr, of the
        shapes and dtypes that they have in it.
    """
    if eqn.primitive.name in _CALLS:
        return run_body(_callee(eqn), values)
    if eqn.primitive.name not in _BODIES:
        return bind(eqn, values)
    if eqn.primitive.name == "scan" and _stacks_anything_twice(eqn):
        return _stack_once(eqn, values, run_body)

    def rewritten(body: Any) -> Any:
        is_closed = isinstance(body, jax.extend.core.ClosedJaxpr)
        closed = body if is_closed else jax.extend.core.ClosedJaxpr(body, ())
        new = jax.make_jaxpr(lambda *xs: run_body(closed, xs))(*closed.in_avals)
        if new.consts:  # there is no place for them
            return body
        return new if is_closed else new.jaxpr

    bodies = {name: eqn.params[name] for name in _BODIES[eqn.primitive.name]}
    return bind(eqn, values, **jax.tree.map(rewritten, bodies))


def _stacks_anything_twice(eqn: Any) -> bool:
    """Whether a scan gives the same values more than once, each with their own copy."""
    variables = [v for v in eqn.params["jaxpr"].jaxpr.outvars if not is_literal(v)]
    return len(set(variables)) < len(variables)


def _stack_once(
    eqn: Any,
    values: Sequence[Any],
    run_body: Callable[[Any, Sequence[Any]], list[Any]],
) -> list[Any]:
    """A scan with one stack for outputs that are the same."""
    loop = as_loop(eqn)
    assert loop is not None
    values = [
        x if isinstance(x, jax.Array) else jnp.asarray(x, aval.dtype)
        for x, aval in zip(values, loop.body.in_avals, strict=True)
    ]
    consts = values[: loop.num_consts]
    carry = values[loop.num_consts : loop.num_consts + loop.num_carry]
    stacked = loop.body.jaxpr.outvars[loop.num_carry :]
    places = {atom: i for i, atom in reversed([*enumerate(map(_name_of, stacked))])}
    kept = sorted(places.values())

    def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs = run_body(loop.body, [*consts, *carry, *xs])
        ys = outputs[loop.num_carry :]
        return outputs[: loop.num_carry], [ys[i] for i in kept]

    xs = values[loop.num_consts + loop.num_carry :]
    carry, ys = jax.lax.scan(body, carry, xs, **loop.options)
    by_place = dict(zip(kept, ys, strict=True))
    return [*carry, *(by_place[places[_name_of(atom)]] for atom in stacked)]


def _name_of(atom: Any) -> Any:
    """What two outputs have in common if they are the same."""
    return id(atom) if is_literal(atom) else atom


def is_literal(atom: Any) -> bool:
    """Whether an operand is a number written in the program."""
    return isinstance(atom, jax.extend.core.Literal)


def name(eqn: Any) -> str:
    """Of the primitive; with `CUSTOM_VJP` before it, of a function with such a rule."""
    if eqn.primitive.name != _CUSTOM_VJP:
        return eqn.primitive.name
    body = eqn.params["call_jaxpr"]
    return CUSTOM_VJP + getattr(body, "jaxpr", body).debug_info.func_name


def bind(eqn: Any, values: Sequence[Any], **changed: Any) -> list[Any]:
    """Evaluates an equation, with some of its parameters changed."""
    params = {**eqn.primitive.get_bind_params(eqn.params), **changed}
    results = eqn.primitive.bind(*values, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def has_body(eqn: Any) -> bool:
    """Whether an equation runs programs of its own: a loop, a branch, a custom rule."""
    return any(
        callable(part) or hasattr(part, "eqns") or hasattr(part, "jaxpr")
        for value in eqn.params.values()
        for part in (value if isinstance(value, tuple) else (value,))
        if not isinstance(part, type)
    )


def as_loop(eqn: Any) -> Loop | None:
    """The parts of a scan; None for other equations."""
    if eqn.primitive.name != "scan":
        return None
    params = eqn.params
    num_consts, num_carry = _counts_of_scan(params)
    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    return Loop(inline(params["jaxpr"]), num_consts, num_carry, options)


def as_rematerialised(eqn: Any) -> tuple[Any, Callable[..., Any]] | None:
    """The closed body of a `jax.checkpoint`, and the wrapper to apply again."""
    if eqn.primitive.name not in _REMATERIALISED:
        return None
    body = jax.extend.core.ClosedJaxpr(eqn.params["jaxpr"], ())
    wrap = functools.partial(
        jax.checkpoint,
        policy=eqn.params["policy"],
        prevent_cse=eqn.params["prevent_cse"],
    )
    return inline(body), wrap


class SubProgram(NamedTuple):
    """A program that an equation runs.

    Attributes:
      jaxpr: of the program.
      invars: for each of its arguments the equation's operand, or None if unknown.
      num_consts: how many of the arguments every iteration sees as they are.
      num_carry: how many, after these, are carried on; 0 for what is no loop.
      length: the number of iterations, or None if it depends on data.
      has_results: whether its results are those of the equation.
    """

    jaxpr: Any
    invars: Sequence[Any]
    num_consts: int = 0
    num_carry: int = 0
    length: int | None = 1
    has_results: bool = True


def sub_programs(eqn: Any) -> list[SubProgram]:
    """The programs that an equation runs, as they are: nothing is traced again."""
    params, operands = eqn.params, list(eqn.invars)
    if eqn.primitive.name == "scan":
        jaxpr, counts = params["jaxpr"].jaxpr, _counts_of_scan(params)
        return [SubProgram(jaxpr, operands, *counts, params["length"])]
    if eqn.primitive.name == "while":
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        carry = operands[num_cond + num_body :]
        cond = SubProgram(
            params["cond_jaxpr"].jaxpr,
            operands[:num_cond] + carry,
            num_cond,
            len(carry),
            None,
            has_results=False,
        )
        body = params["body_jaxpr"].jaxpr
        rest = operands[num_cond:]
        return [cond, SubProgram(body, rest, num_body, len(carry), None)]
    given = operands[1:] if eqn.primitive.name == "cond" else operands
    return [_called(jaxpr, given, eqn) for jaxpr in _jaxprs_in(params)]


def _counts_of_scan(params: dict[str, Any]) -> tuple[int, int]:
    """How many operands are constants, and how many are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # jax 0.12
    return len(list(consts)), len(list(carry))


def _jaxprs_in(params: dict[str, Any]) -> list[Any]:
    parts = [
        part
        for value in params.values()
        for part in (value if isinstance(value, tuple | list) else (value,))
    ]
    jaxprs = [getattr(part, "jaxpr", part) for part in parts]
    return [jaxpr for jaxpr in jaxprs if hasattr(jaxpr, "eqns")]


def _called(jaxpr: Any, operands: Sequence[Any], eqn: Any) -> SubProgram:
    fits = len(jaxpr.invars) == len(operands)
    has_results = len(jaxpr.outvars) == len(eqn.outvars)
    invars = operands if fits else [None] * len(jaxpr.invars)
    return SubProgram(jaxpr, invars, has_results=has_results)


def source_line(eqn: Any, caller: tuple[str, int] | None) -> tuple[str, int]:
    """File and line that asked for an equation.

    Args:
      eqn: any equation.
      caller: the user's line that called the program which it is in, if known:
        equations do not know of it.

    Returns:
      The user's line, or the caller's, or one in an installed package other than jax.
    """
    known = user_line(eqn) or caller or _line(eqn, _OUR_FILES + _JAX_FILES)
    return ("unknown", 0) if known is None else known


def user_line(eqn: Any) -> tuple[str, int] | None:
    """The innermost line that asked for an equation, and is in no installed package."""
    return _line(eqn, _OUR_FILES + _INSTALLED_FILES)


def _line(eqn: Any, skipped: tuple[str, ...]) -> tuple[str, int] | None:
    """Without what called this package, to have a function traced."""
    traceback = eqn.source_info.traceback
    frames = [] if traceback is None else list(traceback.frames)
    ours = [i for i, x in enumerate(frames) if x.file_name.startswith(_OUR_FILES)]
    inner = frames[: ours[-1]] if ours else frames
    lines = ((x.file_name, x.line_num) for x in inner)
    return next((x for x in lines if not x[0].startswith(skipped)), None)


def _folders(*paths: str) -> tuple[str, ...]:
    return tuple(path.rstrip(os.sep) + os.sep for path in paths)


_OUR_FILES = _folders(os.path.dirname(os.path.abspath(__file__)))
_JAX_FILES = _folders(os.path.dirname(jax.__file__))
_LIBRARIES = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
_INSTALLED_FILES = (*_JAX_FILES, *_folders(*_LIBRARIES), "<frozen")
