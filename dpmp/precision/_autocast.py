"""Mixed precision for a model that was written in float32.

The program of the model is traced and evaluated again, with three kinds of operations:

    products        operands and results in the compute dtype, summed in float32
    following       in the dtype of the operands; float32 if they differ
    all others      in float32: sums, exponentials, operations that are not listed

References:
  Micikevicius et al.: Mixed precision training, 2018, section 3.
  https://docs.pytorch.org/docs/stable/amp.html: the lists of PyTorch, which agree with
    these for the most part.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpmp import _validate
from dpmp._arrays import as_device_dtypes
from dpmp._typing import PyTree
from dpmp.precision._policy import Policy
from dpmp.programs import interpreter, primitives

_MARK = "_autocast"  # the function itself; those that wrap it have it too


def autocast(
    fun: Callable[..., PyTree], policy: str | Policy = "mixed_bfloat16"
) -> Callable[..., PyTree]:
    """Makes `fun` compute its products in the compute dtype of a policy.

    Parameters may stay in float32. They are rounded once for each product that needs
    them, and their gradients come back in float32. The result may be differentiated,
    mapped and compiled, and works with both engines of `clipped_grad`. Loops and
    branches are treated in the same way, except that a value keeps its dtype when it is
    carried from one iteration to the next. Functions with derivatives of their own
    (`jax.custom_jvp`, `jax.custom_vjp`) run unchanged, in float32.

    >>> def loss(w, x):
    ...     return jnp.mean(jax.nn.softmax(x @ w) ** 2)
    >>> w, x = jnp.ones((4, 2)), jnp.ones((3, 4))
    >>> print(autocast(lambda w, x: x @ w)(w, x).dtype, autocast(loss)(w, x).dtype)
    float32 float32

    Args:
      fun: a function that computes in float32. Values that it casts to other dtypes
        itself stay in these dtypes.
      policy: a policy, or the name of one. Only its `compute_dtype` counts. A
        `DPTrainer` with an autocast loss must have policy="float32": another policy
        would round all parameters and inputs before this function receives them.

    Returns:
      A function with the same arguments and results, of the same dtypes.

    Raises:
      ValueError: if `fun` is not a function, or if there is no such policy.
    """
    _validate.function(fun=fun)
    dtype = Policy.parse(policy).compute_dtype

    @functools.wraps(fun)
    def cast_fun(*args: Any, **kwargs: Any) -> PyTree:
        args = as_device_dtypes(args)
        closed, treedef = interpreter.trace(lambda *xs: fun(*xs, **kwargs), *args)
        results = _run(closed, jax.tree.leaves(args), dtype)
        return jax.tree.unflatten(treedef, results)

    setattr(cast_fun, _MARK, cast_fun)
    return cast_fun


def is_autocast(fun: Callable[..., Any]) -> bool:
    """Whether a function, or one that it wraps, is the result of `autocast`."""
    return getattr(fun, _MARK, None) is not None


def reference_of(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The function to compare an autocast one with; others are their own."""
    cast_fun = getattr(fun, _MARK, None)
    if cast_fun not in (None, fun):
        _validate.fail(
            "the reference of a function that calls an autocast one must be given. "
            "Pass reference=, the same function without autocast.",
            fun=getattr(fun, "__name__", type(fun).__name__),
        )
    return getattr(cast_fun, "__wrapped__", fun)


def _run(closed: Any, values: Sequence[Any], dtype: Any) -> list[Any]:
    """Returns the outputs of a program, in their dtypes in the program."""

    def evaluate(eqn: Any, values: list[Any]) -> list[Any]:
        name, atoms = eqn.primitive.name, (*eqn.invars, *eqn.outvars)
        if name in primitives.PRODUCTS and all(map(_is_float32, atoms)):
            values = _cast(values, eqn.invars, dtype)
            return interpreter.bind(eqn, values, preferred_element_type=dtype)
        if name in primitives.FOLLOWING and _is_followed(eqn, values, dtype):
            return interpreter.bind(eqn, _cast(values, eqn.invars, dtype))
        values = _cast(values, eqn.invars, jnp.float32)
        return interpreter.bind_bodies(
            eqn, values, functools.partial(_run, dtype=dtype)
        )

    results = interpreter.run(closed, values, evaluate)
    return _cast(results, closed.jaxpr.outvars, jnp.float32)


def _is_followed(eqn: Any, values: Sequence[Any], dtype: Any) -> bool:
    """Whether all float32 operands, except literals, now have the compute dtype."""
    dtypes = {
        jnp.result_type(x)
        for x, atom in zip(values, eqn.invars, strict=True)
        if _is_float32(atom) and not interpreter.is_literal(atom)
    }
    return dtypes == {jnp.dtype(dtype)}


def _cast(values: Sequence[Any], atoms: Sequence[Any], dtype: Any) -> list[Any]:
    """Casts the values that are float32 in the program."""
    return [
        jax.lax.convert_element_type(x, dtype)
        if _is_float32(atom) and jnp.result_type(x) != dtype
        else x
        for x, atom in zip(values, atoms, strict=True)
    ]


def _is_float32(atom: Any) -> bool:
    return getattr(atom.aval, "dtype", None) == jnp.float32
