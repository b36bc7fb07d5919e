"""Finds in the program of a loss mistakes that otherwise no error tells.

- A loss may call a model that keeps its own parameters, and not read those that it is
  given. Its gradient is zero, and the run learns from noise.
- It may draw random numbers (dropout) from a key that it closes over. They are the same
  at every step.
- It may compute the next state of a model (the running averages of BatchNorm) and drop
  it. The state stays as it was, and the model is evaluated with it later.
- It may cast parameters and inputs back, and compute in float32 under a policy of 16
  bits. That costs time and memory, and the policy seems to cost no accuracy.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import _validate
from dpmp._warnings import warn
from dpmp.programs import _bodies, _interpreter

_RANDOM = {"random_bits", "rng_bit_generator", "rng_uniform", "threefry2x32"}
_ON_HOST = ("callback", "debug", "infeed", "outfeed")
_PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot_general"}


def check_program(
    jaxpr: Any, *, num_params: int, takes_key: bool, compute_dtype: Any
) -> None:
    """Checks the jaxpr of a loss, whose first arguments are its parameters.

    The loss is given parameters and float inputs in `compute_dtype`.

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
    if not takes_key and any(eqn.primitive.name in _RANDOM for eqn in _all(jaxpr)):
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
        if name == "check" or any(part in name for part in _ON_HOST):  # of checkify
            return True
        inner = [getattr(x, "jaxpr", x) for x in jax.tree.leaves(eqn.params)]
        if any(calls_host(x) for x in inner if hasattr(x, "eqns")):
            return True
    return False


def _read(jaxpr: Any) -> set[Any]:
    """The variables that an equation reads, or that the program returns."""
    atoms = [x for eqn in jaxpr.eqns for x in eqn.invars] + [*jaxpr.outvars]
    return {x for x in atoms if not _interpreter.is_literal(x)}


def _all(jaxpr: Any) -> Iterator[Any]:
    """The equations of a program, and those of all programs in it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in _bodies.sub_programs(eqn):
            yield from _all(sub.jaxpr)


def _shapes_of_dropped_states(jaxpr: Any) -> list[tuple[int, ...]]:
    """The shapes of arrays that the program makes anew, but neither uses nor returns.

    Such an array depends on an argument of the program, and on an array of its shape
    that the program closes over: the old state. What is computed for an example has a
    leading axis of one, so that it rarely has the shape of a state. (It may: Haiku's
    averages have such an axis, and so has the first state of a recurrent network.)
    """
    read, depends, dropped = _read(jaxpr), set(jaxpr.invars), []
    # The shapes of the states that a variable was computed from.
    sources = {x: {x.aval.shape} for x in jaxpr.constvars if _may_be_state(x.aval)}
    for eqn in jaxpr.eqns:
        inputs = [x for x in eqn.invars if not _interpreter.is_literal(x)]
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
        if eqn.primitive.name in _PRODUCTS
    ]
    of_floats = [
        dtypes
        for dtypes in products
        if all(jnp.issubdtype(x, jnp.floating) for x in dtypes)
    ]
    is_wider = [max(x.itemsize for x in dtypes) > 2 for dtypes in of_floats]
    return bool(is_wider) and all(is_wider)
