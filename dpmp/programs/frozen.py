"""Arrays that functions close over, frozen ones: packed ones, and ones on a mesh.

A quantised base model has four or eight bits for an entry. Before a program multiplies
with a matrix, it casts the matrix and multiplies it by scales. Differentiation would
store the results for the backward pass, and so the whole model in a wide dtype. Here
every operation on an unpacked array unpacks it itself, under `jax.checkpoint`.

A device that holds a part of a stack of layers gathers one layer at a time in the same
way, frozen or trained. And what was traced for arrays on a mesh also runs inside of
`jax.shard_map`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from dpmp import _meshes
from dpmp._typing import PyTree
from dpmp.programs import analysis, interpreter, primitives
from dpmp.programs.interpreter import bind, is_literal

# To unpack a matrix takes about a dozen. A value that is used twice counts twice.
_MOST_OPERATIONS = 64

# Stacks of layers are gathered at once if all of them, with the sums of trained ones,
# take at most this share of a device's memory, and one layer at a time otherwise. That
# takes less memory, and more time, because each microbatch gathers every layer twice.
_SHARE_OF_STACKS = 0.25
_BYTES_IN_SUM = 4


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays"],
    meta_fields=["is_packed", "compute", "num_operations"],
)
@dataclasses.dataclass(frozen=True)
class _Frozen:
    """A value that depends on frozen arrays or trained parts alone: `compute(arrays)`.

    Without `compute`, it is the only one of `arrays`. It is packed if it depends on an
    array of at most eight bits for an entry. Others are computed once.
    `num_operations` is how many operations `compute` makes.
    """

    arrays: tuple[Any, ...]
    is_packed: bool
    compute: Callable[[tuple[Any, ...]], Any] | None = None
    num_operations: int = 0


def hoist_constants(
    fun: Callable[..., PyTree],
    *example_args: Any,
    check: Callable[[Any], None] = lambda program: None,
    spec_of: Callable[[Any], jax.P] = _meshes.spec_of,
    arg_specs: Sequence[jax.P] = (),
) -> tuple[Callable[..., PyTree], list[Any], list[jax.P | None]]:
    """Turns the arrays that `fun` closes over into an argument.

    Otherwise they would be part of the program: a frozen model of a few gigabytes would
    be copied into it, and every change of the model would need a new compilation.
    Arrays that functions under `jax.jit` close over are found too. Two kinds of arrays
    stay in the program: those in the rules of a custom derivative, and those in a
    function under `jax.jit` inside of a loop or a branch.

    `check` is called with the program, a jaxpr, and may raise an exception.

    Returns `hoisted(constants, *args)`, `constants`, and the partition specs of those
    of which it wants a `_meshes.Part` where devices divide a batch. `spec_of` returns
    the spec of a constant, and `arg_specs` has those of the first arrays of `args`. Of
    these, it may want parts too: `constants` may go on with them, or with None. The
    specs go on in the same way. `hoisted` accepts the shapes and dtypes of the example
    arguments only.
    """
    closed, out_treedef = interpreter.trace(fun, *example_args)
    check(closed.jaxpr)
    num_consts = len(closed.consts)

    def hoisted(constants: list[Any], *args: Any) -> PyTree:
        run, leaves = jax.extend.core.jaxpr_as_fun, jax.tree.leaves(args)
        constants, parts = constants[:num_consts], constants[num_consts:]
        given = [x for x in (*constants, *parts) if x is not None]
        if _needs_care([*closed.consts, *given]):
            constants, run = _marked(constants), _as_fun
            leaves[: len(parts)] = map(_trained, parts, leaves)
        same = jax.extend.core.ClosedJaxpr(closed.jaxpr, constants)
        return jax.tree.unflatten(out_treedef, run(same)(*leaves))

    # A NumPy array may be changed in place later, and jax would read the new values.
    consts = [np.array(x) if isinstance(x, np.ndarray) else x for x in closed.consts]
    specs = [*map(spec_of, consts), *arg_specs]
    specs = specs_of_parts(closed, specs)
    of_args = [x if any(x) else None for x in specs[num_consts:]]
    return hoisted, consts, [*specs[:num_consts], *of_args]


def _needs_care(constants: Sequence[Any]) -> bool:
    """Whether a program with such constants should be run by `_as_fun`.

    If constants are on a mesh, its loops must be traced again, because types in their
    bodies name the axes of the mesh as they were outside of `jax.shard_map`.
    """
    return any(
        isinstance(x, _meshes.Part) or _is_packed(x) or _is_on_mesh(x)
        for x in constants
    )


def specs_of_parts(closed: Any, specs: Sequence[jax.P]) -> list[jax.P]:
    """The partition specs of arrays of which devices receive parts alone.

    These are large stacks of layers. `specs` has those of the constants of a jaxpr, and
    then of its first arguments. The result has `P()` for other arrays.
    """
    jaxpr = closed.jaxpr
    variables = [*jaxpr.constvars, *jaxpr.invars][: len(specs)]
    elsewhere = _not_read_by_layers(jaxpr)
    stacks = [x.aval for x in variables if x not in elsewhere]
    trained = [x.aval for x in variables[len(jaxpr.constvars) :] if x not in elsewhere]
    num_bytes = sum(x.size * x.dtype.itemsize for x in stacks)
    num_bytes += sum(x.size * _BYTES_IN_SUM for x in trained)
    if num_bytes <= _SHARE_OF_STACKS * _meshes.memory_of_device():
        return [jax.P()] * len(specs)
    pairs = zip(variables, specs, strict=True)
    return [jax.P() if x in elsewhere else spec for x, spec in pairs]


def with_parts(
    constants: Sequence[Any], params: Any, specs: Sequence[jax.P | None]
) -> list[Any]:
    """Constants, and after them the parameters of which devices receive parts.

    None stands for other parameters. `specs` are those that `hoist_constants` returns.
    """
    of_params = specs[len(constants) :]
    pairs = zip(jax.tree.leaves(params), of_params, strict=True)
    return [*constants, *(None if spec is None else x for x, spec in pairs)]


def _not_read_by_layers(jaxpr: Any) -> set[Any]:
    """The variables that are not read by loops alone, a slice at a time."""
    *reads, returned = interpreter.variables_read(jaxpr)
    elsewhere = set(returned)
    for eqn, read in zip(jaxpr.eqns, reads, strict=True):
        is_scan = eqn.primitive.name == primitives.SCAN
        first = sum(interpreter.counts_of_scan(eqn.params)) if is_scan else None
        slices = [] if first is None else eqn.invars[first:]
        elsewhere.update(x for x in read if not any(x is y for y in slices))
    return elsewhere


def _is_on_mesh(array: Any) -> bool:
    return isinstance(getattr(array, "sharding", None), jax.NamedSharding)


def _marked(constants: Sequence[Any]) -> list[Any]:
    """Marks the constants of a closed jaxpr as frozen, for `_as_fun`."""
    return [
        _Frozen((x,), True, _whole, num_operations=1)
        if isinstance(x, _meshes.Part)
        else _Frozen((x,), _is_packed(x))
        for x in constants
    ]


def _trained(part: Any, param: Any) -> Any:
    """A parameter for `_as_fun`, which reads a part instead if there is one."""
    if not isinstance(part, _meshes.Part):
        return param
    # The compiler would gather a parameter for a loop that does not read it.
    stand_in = read_instead(jnp.zeros(param.shape, param.dtype), param)
    return _Frozen((part, stand_in), True, _whole, num_operations=1)


def _whole(arrays: tuple[Any, ...]) -> jax.Array:
    part, *param = arrays
    return read_instead(part.whole(), *param) if param else part.whole()


def _first(value: jax.Array, param: jax.Array) -> jax.Array:
    """Returns `value`, and sends gradients to `param`, which is not read."""
    del param
    return value


# A program shows a `jax.custom_vjp` under the name of its function.
_first.__name__ = "dpmp.read_instead"
_READ_INSTEAD = interpreter.CUSTOM_VJP + _first.__name__
read_instead = jax.custom_vjp(_first)
read_instead.defvjp(
    lambda value, param: (value, None),
    lambda _, gradient: (jnp.zeros_like(gradient), gradient),
)


def args_read(closed: Any) -> set[int]:
    """The numbers of the arguments whose values a program reads."""
    jaxpr = closed.jaxpr
    *of_equations, returned = interpreter.variables_read(jaxpr)
    read = set(returned)
    for eqn, variables in zip(jaxpr.eqns, of_equations, strict=True):
        if not reads_instead(eqn):
            read.update(variables)
    return {i for i, x in enumerate(jaxpr.invars) if x in read}


def reads_instead(eqn: Any) -> bool:
    """Whether an equation is a call of `read_instead`."""
    return interpreter.name(eqn) == _READ_INSTEAD


def _is_packed(array: Any) -> bool:
    return array.dtype.itemsize == 1 and array.dtype != bool  # which is a mask


def _as_fun(closed: Any) -> Callable[..., list[Any]]:
    """The function of a closed jaxpr with frozen constants, to be differentiated."""
    return lambda *args: [_value(x) for x in interpreter.run(closed, args, _evaluate)]


def _value(x: Any) -> Any:
    if not isinstance(x, _Frozen):
        return x
    return x.arrays[0] if x.compute is None else x.compute(x.arrays)


def _evaluate(eqn: Any, values: list[Any]) -> list[Any]:
    pairs = zip(values, eqn.invars, strict=True)
    operands = {i: x for i, (x, atom) in enumerate(pairs) if not is_literal(atom)}

    def evaluated(operands: dict[int, Any]) -> list[Any]:
        given = [_value(operands.get(i, x)) for i, x in enumerate(values)]
        mesh = _mesh_of(eqn)
        if eqn.primitive.name == primitives.CUSTOM_JVP and not mesh.empty:
            return list(_custom_jvp(eqn, mesh)(*given))
        if (branches := interpreter.as_branches(eqn)) is None:
            return bind(eqn, given, **_without_meshes(eqn))
        # Outside of the branches, parts are gathered on all devices together.
        pairs = zip(given, values, strict=True)
        index, *args = (
            _Frozen((x,), is_packed=False) if isinstance(old, _Frozen) else x
            for x, old in pairs
        )
        return jax.lax.switch(_value(index), [*map(_as_fun, branches)], *args)

    frozen = [x for x in operands.values() if isinstance(x, _Frozen)]
    if len(frozen) == len(operands):
        return _of_frozen(eqn, operands, evaluated)
    if frozen and (loop := interpreter.as_loop(eqn)) is not None:
        end = loop.num_consts + loop.num_carry
        values[loop.num_consts : end] = map(_value, values[loop.num_consts : end])
        values[end:] = map(_to_be_sliced, values[end:])
        return interpreter.run_loop(loop, values, lambda x, args: _as_fun(x)(*args))
    if frozen and (found := interpreter.as_rematerialised(eqn)) is not None:
        body, wrap = found
        return wrap(_as_fun(body))(*values)
    if any(x.compute for x in frozen):
        return jax.checkpoint(evaluated)(operands)
    return evaluated(operands)


def _without_meshes(eqn: Any) -> dict[str, Any]:
    """Parameters that leave the sharding of a result to the compiler.

    Values that depend on constants on a mesh were traced for the axes of that mesh as
    they were outside of `jax.shard_map`. A constraint that the user has written stays.
    """
    if eqn.primitive.name == primitives.SHARDING_CONSTRAINT:
        return {}
    names = {"sharding", "out_sharding"} & eqn.params.keys()
    return {x: None for x in names if hasattr(eqn.params[x], "mesh")}


def _mesh_of(eqn: Any) -> Any:
    """The mesh for which the equation was traced, or an empty one."""
    meshes = [atom.aval.sharding.mesh for atom in eqn.invars if atom.aval.ndim]
    none = jax.sharding.AbstractMesh((), ())
    return next((mesh for mesh in meshes if not mesh.empty), none)


def _custom_jvp(eqn: Any, mesh: Any) -> Callable[..., tuple[Any, ...]]:
    """The function of a `jax.custom_jvp`, whose rule jax traces when it is used.

    It is traced for the types that the program was traced for, on their mesh.
    """
    types = tuple(atom.aval for atom in eqn.invars)

    @jax.custom_jvp
    def fun(*args: Any) -> tuple[Any, ...]:
        return tuple(_as_fun(eqn.params["call_jaxpr"])(*args))

    @fun.defjvp
    def rule(args: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
        def both(args: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
            return jax.jvp(lambda *xs: tuple(bind(eqn, xs)), args, tangents)

        of_tangents = tuple(
            x.update(dtype=jnp.result_type(y))
            for x, y in zip(types, tangents, strict=True)
        )
        with jax.sharding.use_abstract_mesh(mesh):
            made = jax.make_jaxpr(both, return_shape=True)(types, of_tangents)
        closed, shapes = made
        results = _as_fun(closed)(*args, *tangents)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return fun


def _of_frozen(
    eqn: Any, operands: dict[int, Any], evaluated: Callable[..., list[Any]]
) -> list[Any]:
    """Leaves cheap operations on packed arrays for later, and evaluates the others."""
    is_cheap = eqn.primitive.name not in primitives.ALL_PRODUCTS
    is_cheap = is_cheap and not analysis.has_body(eqn)
    num_operations = 1 + sum(x.num_operations for x in operands.values())
    is_cheap = is_cheap and num_operations <= _MOST_OPERATIONS
    if not (is_cheap and any(x.is_packed for x in operands.values())):
        return [_Frozen((x,), is_packed=False) for x in evaluated(operands)]
    arrays, treedef = jax.tree.flatten(operands)

    def compute(output: int, arrays: tuple[Any, ...]) -> Any:
        return evaluated(jax.tree.unflatten(treedef, arrays))[output]

    return [
        _Frozen(tuple(arrays), True, functools.partial(compute, i), num_operations)
        for i in range(len(eqn.outvars))
    ]


def _to_be_sliced(x: Any) -> Any:
    """A value of which a loop takes slices: those of a part are gathered one by one."""
    if not (isinstance(x, _Frozen) and x.compute):
        return x
    if x.compute is not _whole or x.arrays[0].axis == 0:
        return _value(x)
    part, *param = x.arrays
    return dataclasses.replace(x, arrays=(part.to_be_sliced(), *param))
