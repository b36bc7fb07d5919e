"""Checks the loss of a user, explains errors in it, and warns of silent mistakes.

Some mistakes cause no error. They are found in the program of the loss:

- A loss may call a model that has its own parameters, and ignore the parameters that it
  receives. Its gradient is zero, and the run learns from noise.
- It may draw random numbers (dropout) from a key that it closes over. They are the same
  at every step.
- It may compute the next state of a model (the running averages of BatchNorm) and drop
  it. The state stays as it was, and the model is evaluated with it later.
- It may cast parameters and inputs back, and compute in float32 under a policy of 16
  bits. That costs time and memory, and the policy seems to cost no accuracy.

Messages name types, shapes and dtypes. They never show a value.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp._warnings import warn
from dpmp.programs import bodies, interpreter, primitives

_RECIPES = "Recipes for Flax, Equinox, Haiku and Keras are in docs/recipes.md."


def check_loss(loss_fn: Any, *, uses_prng_key: bool) -> None:
    """Raises ValueError unless the loss can be called with the trainer's arguments."""
    arguments = ("params", "batch", "key") if uses_prng_key else ("params", "batch")
    wanted = f"loss_fn must be a function of ({', '.join(arguments)})"
    _validate.require(
        callable(loss_fn),
        wanted,
        loss_fn=type(loss_fn).__name__,
        fix="Pass the function itself.",
    )
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # some callables have no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        _validate.fail(
            wanted,
            # Without defaults, which might be arrays of private data.
            loss_fn=f"({', '.join(signature.parameters)})",
            uses_prng_key=uses_prng_key,
            fix="With uses_prng_key=True, the loss is given a key of its own for each "
            "example, for dropout and the like.",
        )


def with_checked_result(loss_fn: Callable[..., Any]) -> Callable[..., jax.Array]:
    """Makes a loss raise ValueError unless its result is a scalar."""

    def checked(*args: Any) -> jax.Array:
        loss = loss_fn(*args)
        is_array = hasattr(loss, "shape") or isinstance(loss, float)
        given = (
            f"an array of shape {jnp.shape(loss)}" if is_array else type(loss).__name__
        )
        _validate.require(
            is_array and jnp.shape(loss) == (),
            "loss_fn must return the loss of one example, a float scalar",
            loss=given,
            fix="Reduce it with jnp.mean. Return nothing beside it: values of examples "
            "are sensitive, and a model's state must not depend on them.",
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
        if (hint := _hint(error)) is not None:
            error.add_note(f"dpmp: {hint} {_RECIPES}")
        raise


def _hint(error: Exception) -> str | None:
    name, text = type(error).__name__, str(error)
    return next((x for k, part, x in _HINTS if k == name and part in text), None)


def _describe(batch: PyTree, compute_dtype: Any) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    parts = [
        f"batch{jax.tree_util.keystr(path)}: {x.dtype.name}{list(x.shape)}"
        for path, x in leaves
    ]
    return (
        "dpmp: this happened in loss_fn, which is called with one example as a batch "
        f"of one: {', '.join(parts)}. Parameters and float inputs are "
        f"{np.dtype(compute_dtype).name}, as the policy says. Where a model needs "
        "other dtypes, cast in the loss, or use policy='float32' with "
        "dpmp.autocast(loss_fn)."
    )


_BATCH_NORM = (
    "Averages over a batch (BatchNorm) depend on all its examples, and have no place "
    "in private training: use GroupNorm or LayerNorm."
)

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
    jaxpr: Any, *, num_params: int, takes_key: bool, compute_dtype: Any
) -> None:
    """Checks the jaxpr of a loss, whose first arguments are its parameters.

    The loss receives parameters and float inputs in `compute_dtype`.

    Raises:
      ValueError: if nothing reads the parameters.

    Warns:
      UserWarning: if the loss draws random numbers without a key of its own, if it
        drops the next state of a model, or if no product has a `compute_dtype` of 16
        bits.
    """
    params = set(jaxpr.invars[:num_params])
    _validate.require(
        bool(params & _read(jaxpr)),
        "loss_fn must compute with the params that it is given",
        reads_params=False,
        fix="Models of Keras, NNX and Equinox have parameters of their own. Use "
        "model.stateless_call(params, ...), nnx.merge(graphdef, params), or "
        "eqx.combine(params, static). docs/recipes.md has each of them.",
    )
    names = {eqn.primitive.name for eqn in _all(jaxpr)}
    if not takes_key and not names.isdisjoint(primitives.RANDOM):
        warn(
            "loss_fn draws random numbers from a key that never changes, so that they "
            "are the same for every example at every step. For dropout, pass "
            "uses_prng_key=True, and draw from the key that the loss is then given."
        )
    if shapes := _shapes_of_dropped_states(jaxpr):
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
    if dtype.itemsize == 2 and _all_products_are_wider(jaxpr):
        warn(
            f"loss_fn computes no product in {dtype.name}, though the policy says so. "
            "Either it casts the parameters or inputs back to a wider dtype, as models "
            f'of Keras do until keras.config.set_dtype_policy("mixed_{dtype.name}") is '
            "called before they are made. Or it multiplies them with frozen arrays of "
            "a wider dtype, which can be cast. For any other loss, use "
            'dpmp.autocast(loss_fn), or policy="float32" if this is meant.'
        )


def calls_host(jaxpr: Any) -> bool:
    """Whether a jaxpr calls functions on the host, such as `jax.debug.print`."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == primitives.CHECK or any(part in name for part in primitives.ON_HOST):
            return True
        inner = [getattr(x, "jaxpr", x) for x in jax.tree.leaves(eqn.params)]
        if any(calls_host(x) for x in inner if hasattr(x, "eqns")):
            return True
    return False


def _read(jaxpr: Any) -> set[Any]:
    """The variables that equations read or that the program returns."""
    atoms = [x for eqn in jaxpr.eqns for x in eqn.invars] + [*jaxpr.outvars]
    return {x for x in atoms if not interpreter.is_literal(x)}


def _all(jaxpr: Any) -> Iterator[Any]:
    """The equations of a program, and those of all programs in it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in bodies.sub_programs(eqn):
            yield from _all(sub.jaxpr)


def _shapes_of_dropped_states(jaxpr: Any) -> list[tuple[int, ...]]:
    """The shapes of arrays that the program computes, but neither uses nor returns.

    Such an array depends on an argument of the program, and on an array of its shape
    that the program closes over: the old state. A value for an example has a leading
    axis of one, so that it rarely has the shape of a state. (It may: Haiku's averages
    have such an axis, and so has the first state of a recurrent network.)
    """
    read, depends, dropped = _read(jaxpr), set(jaxpr.invars), []
    # The shapes of the states that a variable was computed from.
    sources = {x: {x.aval.shape} for x in jaxpr.constvars if _may_be_state(x.aval)}
    for eqn in jaxpr.eqns:
        inputs = [x for x in eqn.invars if not interpreter.is_literal(x)]
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


def _all_products_are_wider(jaxpr: Any) -> bool:
    """Whether there are products of floats, and all have an operand above 16 bits."""
    products = [
        [x.aval.dtype for x in eqn.invars[:2]]
        for eqn in _all(jaxpr)
        if eqn.primitive.name in (*primitives.PRODUCTS, *primitives.RAGGED_DOTS)
    ]
    of_floats = [
        dtypes
        for dtypes in products
        if all(jnp.issubdtype(x, jnp.floating) for x in dtypes)
    ]
    is_wider = [max(x.itemsize for x in dtypes) > 2 for dtypes in of_floats]
    return bool(is_wider) and all(is_wider)
