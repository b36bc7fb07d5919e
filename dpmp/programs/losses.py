"""Checks the loss of a user, explains errors in it, and warns of silent mistakes.

Some mistakes cause no error. They are found in the program of the loss:

- A loss may call a model that has its own parameters, and ignore the parameters that it
  receives, or some of them. Their gradient is zero, and noise alone trains them.
- It may draw random numbers (dropout) from a key that it closes over. They are the same
  at every step.
- It may compute the next state of a model (the running averages of BatchNorm) and drop
  it. The state stays as it was, and the model is evaluated with it later.
- It may cast parameters and inputs back, and compute in float32 under a policy of 16
  bits. That costs time and memory, and the policy seems to cost no accuracy.

Messages name types, shapes and dtypes. They never show a value.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp._warnings import warn
from dpmp.programs import analysis, interpreter, primitives

_RECIPES = "Recipes for Flax, Equinox, Haiku and Keras are in docs/recipes.md."


def check_loss(loss_fn: Any, *, uses_prng_key: bool) -> None:
    """Raises ValueError unless the loss can be called with the trainer's arguments."""
    arguments = ("params", "batch", "key") if uses_prng_key else ("params", "batch")
    _validate.function(
        *arguments,
        loss_fn=loss_fn,
        fix="A batch is one argument, a tuple or a dict if it has several arrays. With "
        "uses_prng_key=True, the loss is given a key of its own for each example, for "
        "dropout and the like.",
    )


def with_checked_result(loss_fn: Callable[..., Any]) -> Callable[..., jax.Array]:
    """Makes a loss raise ValueError unless its result is a float scalar."""

    def checked(*args: Any) -> jax.Array:
        loss = loss_fn(*args)
        is_array = hasattr(loss, "shape") or isinstance(loss, float)
        dtype = jnp.result_type(loss) if is_array else np.dtype(object)
        if not jnp.issubdtype(dtype, jnp.floating) or jnp.shape(loss) != ():
            _validate.fail(
                "loss_fn must return the loss of one example, a float scalar with a "
                "gradient. Reduce it with jnp.mean. Return nothing beside it: values "
                "of examples are sensitive, and a model's state must not depend on "
                "them.",
                loss=f"{dtype}{[*jnp.shape(loss)]}"
                if is_array
                else type(loss).__name__,
            )
        return jnp.asarray(loss)

    return checked


@contextlib.contextmanager
def explained(batch: PyTree, compute_dtype: Any) -> Iterator[None]:
    """Adds notes to an error in the loss: its arguments' types, and a likely fix."""
    try:
        yield
    except Exception as error:
        error.add_note(_describe(batch, compute_dtype))
        for name, part, hint in _HINTS:
            if name == type(error).__name__ and part in str(error):
                error.add_note(f"dpmp: {hint} {_RECIPES}")
        raise


def _describe(batch: PyTree, compute_dtype: Any) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    parts = [
        f"batch{jax.tree_util.keystr(path)}: {x.dtype.name}{list(x.shape)}"
        for path, x in leaves
    ]
    return (
        "dpmp: this happened in loss_fn(params, batch), which is called with one "
        f"example as a batch of one: {', '.join(parts)}. Parameters and float inputs "
        f"are {np.dtype(compute_dtype).name}, as the policy says. Where a model needs "
        "other dtypes, cast in the loss, or use policy='float32' with "
        "dpmp.autocast(loss_fn)."
    )


_BATCH_NORM = (
    "Averages over a batch (BatchNorm) depend on all its examples, and have no place "
    "in private training: use GroupNorm or LayerNorm."
)

# An array with fewer rows than this is probably a part of the model.
_MANY = 100

_NO_KEY = (
    "the model needs a key. Pass uses_prng_key=True, and hand the key that the loss is "
    "given to the model: "
)

# Exceptions are known by their names and a part of their messages, so that no other
# library has to be imported.
_HINTS = (
    (
        "TraceContextError",
        "",
        "the loss changes a variable of an NNX model. For dropout, copy the model in "
        "the loss, nnx.merge(..., copy=True), and set its keys with nnx.reseed. "
        + _BATCH_NORM,
    ),
    (
        "ModifyScopeVariableError",
        "",
        f"the loss changes a variable of a Linen model. {_BATCH_NORM}",
    ),
    ("NonEmptyStateError", "", f"the loss changes a state of Haiku. {_BATCH_NORM}"),
    ("NameError", "unbound axis name", _BATCH_NORM),
    ("InvalidRngError", "", _NO_KEY + "rngs={'dropout': key}."),
    ("MissingRNGError", "", _NO_KEY + "net.apply(params, key, ...)."),
    ("RuntimeError", "requires a key", _NO_KEY + "net(x, key=key)."),
)


def check_program(
    jaxpr: Any,
    *,
    params: Sequence[str],
    num_columns: int,
    takes_key: bool,
    compute_dtype: Any,
    float32_paths: Sequence[str] = (),
    num_examples: int | None = None,
) -> None:
    """Checks the jaxpr of a loss, with parameters and then columns as arguments.

    The loss receives parameters and float inputs in `compute_dtype`. Raises ValueError
    if nothing reads the parameters or the batch, and warns of the other mistakes.
    `params` has the paths of the parameters; `num_examples` is None if it is private.
    `float32_paths` are those of a policy that stores all parameters in float32.
    """
    read = interpreter.variables_read(jaxpr)
    all_read = set().union(*read)
    columns = jaxpr.invars[len(params) : len(params) + num_columns]
    if all_read.isdisjoint(columns):
        _validate.fail(
            "loss_fn must compute with the batch that it is given. Data that it "
            "closes over would be seen by all examples, and would not be protected.",
            reads_batch=False,
        )
    if all_read.isdisjoint(jaxpr.invars[: len(params)]):
        _validate.fail(
            "loss_fn must compute with the params that it is given. Models of Keras, "
            "NNX and Equinox have parameters of their own. Use "
            "model.stateless_call(params, ...), nnx.merge(graphdef, params), or "
            "eqx.combine(params, static). docs/recipes.md has each of them.",
            reads_params=False,
        )
    pairs = zip(params, jaxpr.invars[: len(params)], strict=True)
    reached = all_read if jaxpr.effects else analysis.reached(jaxpr)
    if others := [path for path, variable in pairs if variable not in reached]:
        warn(
            f"no gradient of loss_fn reaches {len(others)} of {len(params)} arrays of "
            f"params, such as {', '.join(others[:3])}: it does not read them, stops "
            "their gradient, or drops what it computes from them, as for averages of "
            "BatchNorm. Noise alone would train them. Leave them out of params; the "
            "loss may close over them."
        )
    eqns = analysis.equations(jaxpr)
    names = {eqn.primitive.name for eqn in eqns}
    if not names.isdisjoint(primitives.LOOPS_AND_CHECKPOINTS) and any(
        x.aval.sharding.mesh.explicit_axes for x in jaxpr.constvars
    ):
        _validate.fail(
            "arrays that loss_fn closes over must be on auto axes if it has loops or "
            "checkpoints. Use a mesh with axis_types=(jax.sharding.AxisType.Auto,) * "
            "number_of_axes.",
            axes="explicit",
        )
    rows = {x.aval.shape[:1] for x in jaxpr.constvars if x in all_read}
    if num_examples and num_examples >= _MANY and (num_examples,) in rows:
        warn(
            f"loss_fn closes over an array with {num_examples} rows, as many as there "
            "are examples. If it holds data, nothing protects it: all examples would "
            "see all of it. Make it a column of the dataset, from which the loss "
            "is given its example's row."
        )
    if not takes_key and not names.isdisjoint(primitives.RANDOM):
        warn(
            "loss_fn draws random numbers from a key that never changes, so that they "
            "are the same for every example at every step. For dropout, pass "
            "uses_prng_key=True, and draw from the key that the loss is then given."
        )
    if shapes := _shapes_of_dropped_states(jaxpr, read):
        warn(
            f"loss_fn computes new values of {len(shapes)} arrays that it closes over, "
            f"of the shapes {', '.join(map(str, shapes))}, and drops them. The state "
            "of a model does not change in private training. If these are no states, "
            "nothing is wrong. If this is BatchNorm, it "
            "normalises each example by itself, and its averages stay as they were, so "
            "that the model would be wrong in evaluation: use GroupNorm or LayerNorm. "
            "See docs/recipes.md."
        )
    dtype = np.dtype(compute_dtype)
    is_narrow = dtype.itemsize == 2
    if is_narrow and float32_paths and (rounded := _rounded_parameters(jaxpr, params)):
        warn(
            "loss_fn rounds parameters to 16 bits that float32_paths keeps in float32: "
            f"{', '.join(rounded)}. Their layer has a dtype of its own. Give it "
            "dtype=jnp.float32, or leave the paths out."
        )
    if is_narrow and any(_is_cast_to_integers(x, columns) for x in jaxpr.eqns):
        last = 2 ** (jnp.finfo(dtype).nmant + 1)
        warn(
            "loss_fn casts a column of floats to integers. The policy has rounded it "
            f"to {dtype.name}, in which most whole numbers above {last} do not exist: "
            "tokens or labels would be others. Make it a column of integers."
        )
    if is_narrow and (narrow := are_narrow(eqns)) and not any(narrow):
        warn(
            f"loss_fn computes no product in {dtype.name}, though the policy says so. "
            "Either it casts the parameters or inputs back to a wider dtype, as models "
            f'of Keras do until keras.config.set_dtype_policy("mixed_{dtype.name}") is '
            "called before they are made, and as layers with a dtype of their own do "
            "(nnx.Embed of Flax has float32: pass its dtype). Or it combines them with "
            "frozen arrays or random numbers of a wider dtype, which can be cast, or "
            "does not cast back the result of a layer in float32_paths. For "
            'any other loss, use policy="float32", with dpmp.autocast(loss_fn) if '
            f"products in {dtype.name} are meant."
        )


def calls_host(jaxpr: Any) -> bool:
    """Whether the host sees what a jaxpr computes, beside its results.

    The jaxpr may call functions on the host, such as `jax.debug.print`, or have other
    effects: it may write to a reference (`jax.new_ref`).
    """
    if jaxpr.effects:
        return True
    names = {eqn.primitive.name for eqn in analysis.equations(jaxpr)}
    return primitives.CHECK in names or any(
        part in name for name in names for part in primitives.ON_HOST
    )


def _shapes_of_dropped_states(
    jaxpr: Any, inputs_of: Sequence[list[Any]]
) -> list[tuple[int, ...]]:
    """The shapes of arrays that the program computes, but neither uses nor returns.

    Such an array depends on an argument of the program, and on an array of its shape
    that the program closes over: the old state. A value for an example has a leading
    axis of one, so that it rarely has the shape of a state. (It may: Haiku's averages
    have such an axis, and so has the first state of a recurrent network.)
    """
    read, depends, dropped = set().union(*inputs_of), set(jaxpr.invars), []
    # The shapes of the states that a variable was computed from.
    sources = {x: {x.aval.shape} for x in jaxpr.constvars if _may_be_state(x.aval)}
    for eqn, inputs in zip(jaxpr.eqns, inputs_of, strict=False):
        if shapes := set().union(*(sources.get(x, ()) for x in inputs)):
            sources.update(dict.fromkeys(eqn.outvars, shapes))
        if depends.isdisjoint(inputs):
            continue
        depends.update(eqn.outvars)
        given = [x.aval.shape for x in eqn.outvars if x not in read]
        dropped += [shape for shape in given if shape in shapes]
    return dropped


def _may_be_state(aval: Any) -> bool:
    return aval.ndim > 0 and jnp.issubdtype(aval.dtype, jnp.floating)


def _rounded_parameters(jaxpr: Any, params: Sequence[str]) -> list[str]:
    """The parameters of more than 16 bits that are read in 16 bits alone."""
    of_uses = {x: [] for x in jaxpr.invars[: len(params)]}
    for eqn in jaxpr.eqns:
        is_cast = eqn.primitive.name == primitives.CAST
        for x in eqn.invars:
            if not interpreter.is_literal(x) and x in of_uses:
                of_uses[x].append(eqn.outvars[0].aval.dtype if is_cast else None)
    return [
        path
        for path, (x, uses) in zip(params, of_uses.items(), strict=True)
        if jnp.issubdtype(x.aval.dtype, jnp.floating)
        and x.aval.dtype.itemsize > 2
        and uses
        and all(to is not None and _is_16_bit_float(to) for to in uses)
    ]


def _is_16_bit_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 2


def _is_cast_to_integers(eqn: Any, columns: Sequence[Any]) -> bool:
    return (
        eqn.primitive.name == primitives.CAST
        and eqn.invars[0] in columns
        and jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating)
        and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.integer)
    )


def are_narrow(eqns: Sequence[Any]) -> list[bool]:
    """Of each product of floats, whether its operands have at most 16 bits."""
    products = [
        x.invars[:2] for x in eqns if x.primitive.name in primitives.ALL_PRODUCTS
    ]
    dtypes = [[x.aval.dtype for x in operands] for operands in products]
    return [
        max(x.itemsize for x in some) <= 2
        for some in dtypes
        if all(jnp.issubdtype(x, jnp.floating) for x in some)
    ]
