"""Rewrites the program of a function without changing its result."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from dpmp import _meshes, _validate
from dpmp._typing import PyTree
from dpmp.programs import frozen, primitives
from dpmp.programs.bodies import bind_bodies, has_primitive
from dpmp.programs.interpreter import Rule, bind, run, trace


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
    closed, out_treedef = trace(fun, *example_args)
    check(closed.jaxpr)
    num_consts = len(closed.consts)

    def hoisted(constants: list[Any], *args: Any) -> PyTree:
        as_fun, leaves = jax.extend.core.jaxpr_as_fun, jax.tree.leaves(args)
        constants, parts = constants[:num_consts], constants[num_consts:]
        given = [x for x in (*constants, *parts) if x is not None]
        if frozen.needs_care([*closed.consts, *given]):
            constants, as_fun = frozen.marked(constants), frozen.as_fun
            leaves[: len(parts)] = map(frozen.trained, parts, leaves)
        same = jax.extend.core.ClosedJaxpr(closed.jaxpr, constants)
        return jax.tree.unflatten(out_treedef, as_fun(same)(*leaves))

    # A NumPy array may be changed in place later, and jax would read the new values.
    consts = [np.array(x) if isinstance(x, np.ndarray) else x for x in closed.consts]
    specs = [*map(spec_of, consts), *arg_specs]
    specs = frozen.specs_of_parts(closed, specs)
    of_args = [x if any(x) else None for x in specs[num_consts:]]
    return hoisted, consts, [*specs[:num_consts], *of_args]


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


def without_ragged_products(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns `fun` with ordinary products in place of `jax.lax.ragged_dot`.

    `jax.vmap` has no rule for products with ragged groups. The ordinary product
    multiplies each row by the matrices of all groups, and keeps the result of the row's
    own group. With k groups, it takes k times as long.
    """
    return rewrite(fun, {primitives.RAGGED_DOT: _ordinary_product})


def has_ragged_products(jaxpr: Any) -> bool:
    """Whether a program, or a program inside of it, has a ragged product."""
    return has_primitive(jaxpr, primitives.RAGGED_DOT)


def _ordinary_product(eqn: Any, values: list[Any]) -> list[jax.Array]:
    """Evaluates the equation of a ragged product; rows of no group become zero."""
    left, right, group_sizes = values
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracting, batch) = numbers.dot_dimension_numbers
    (row_axis,) = numbers.lhs_ragged_dimensions
    if row_axis in (*contracting[0], *batch[0]):
        _validate.fail(
            "groups of a ragged product must be groups of rows. Use "
            "jax.lax.ragged_dot, or one-hot groups and jnp.einsum.",
            lhs_ragged_dimensions=(row_axis,),
        )
    (group_axis,) = numbers.rhs_group_dimensions
    free_left = [i for i in range(left.ndim) if i not in (*contracting[0], *batch[0])]
    free_right = [i for i in range(right.ndim) if i not in (*contracting[1], *batch[1])]
    everything = jax.lax.dot_general(
        left,
        right,
        numbers.dot_dimension_numbers,
        precision=eqn.params["precision"],
        preferred_element_type=eqn.params["preferred_element_type"],
    )
    rows = len(batch[0]) + free_left.index(row_axis)
    groups = len(batch[0]) + len(free_left) + free_right.index(group_axis)
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(left.shape[row_axis])[:, None]
    is_own = (ends - group_sizes <= row) & (row < ends)  # (rows, groups)
    shape = [1] * everything.ndim
    shape[rows], shape[groups] = is_own.shape
    return [jnp.sum(everything, axis=groups, where=is_own.reshape(shape))]
