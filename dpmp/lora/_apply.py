"""Adds the changes of adapters to a function, or to the arrays of a model."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.lora._adapters import (
    Adapters,
    check_adapters,
    check_base,
    check_shapes,
    factor_axes,
)
from dpmp.lora._fingerprint import fingerprint
from dpmp.lora._names import path_of
from dpmp.lora._rewriting import run_with_targets
from dpmp.lora._views import Target
from dpmp.programs import interpreter


def apply(fun: Callable[..., Any], params: PyTree) -> Callable[..., Any]:
    """Turns `fun(params, ...)` into `adapted(adapters, ...)`, with `params` frozen.

    Every product x W with a target W becomes x W + scale (x A) B, in the program of the
    function: within loops over layers, under `jax.checkpoint`, and whatever library the
    model was written in. W + scale A B and its gradient are never materialized.

    >>> def loss(params, x):
    ...     return jnp.sum((x @ params["kernel"]) ** 2)
    >>> params = {"kernel": jnp.ones((3, 2))}
    >>> adapters = init(jax.random.key(0), params, rank=1, targets="kernel")
    >>> adapted = apply(loss, params)
    >>> print(adapted(adapters, jnp.ones(3)))
    18.0

    `DPTrainer` makes the frozen arrays an argument of its compiled step. In a loop of
    your own, pass `params` to the function under `jax.jit`, and call `apply` in it.
    Otherwise the arrays become constants of the program.

    Args:
      fun: a function whose first argument is the tree of parameters.
      params: the parameters. They are not cast, so that a base model in bfloat16 stays
        in bfloat16. Factors are cast to the dtype of the inputs in each product.

    Returns:
      A function with adapters, made by `init` for these parameters, as its first
      argument. Its other arguments are those of `fun`. It can be differentiated, mapped
      and compiled, and works with both engines of `clipped_grad`.

    Raises:
      ValueError: if `fun` is not a function. When the result is called: if the adapters
        belong to other parameters, or if `fun` does not multiply with a target.
    """
    _validate.function(fun=fun)
    base = fingerprint(params)

    @functools.wraps(fun)
    def adapted(adapters: Adapters, *args: Any, **kwargs: Any) -> Any:
        check_adapters(adapters)
        check_base(adapters, base)
        check_shapes(adapters, params)
        closed, treedef = interpreter.trace(
            lambda *xs: fun(*xs, **kwargs), params, *args
        )
        targets = [Target(path, adapters.scale) for path, _ in adapters.axes]
        leaves = jax.tree.leaves((params, *args))
        outputs = run_with_targets(closed, leaves, params, targets, adapters)
        return jax.tree.unflatten(treedef, outputs)

    return adapted


def merge(params: PyTree, adapters: Adapters) -> PyTree:
    """Adds the changes to the arrays, and returns a model that needs no adapters.

    The changes are computed in float32, and the sums are rounded to the dtypes of the
    parameters. In bfloat16, that rounding is often as large as the change. If you have
    the base model in float32, merge into it with `adapters.for_base(params)`.

    Raises:
      ValueError: if the adapters belong to other parameters. Parameters into which the
        adapters were merged before are other parameters.
    """
    check_adapters(adapters)
    check_base(adapters, fingerprint(params))
    check_shapes(adapters, params)
    axes = dict(adapters.axes)

    def merged(keys: Any, x: Any) -> Any:
        path = path_of(keys)
        if path not in axes:
            return x
        a, b = (factor.astype(jnp.float32) for factor in adapters.factors[path])
        names_a, names_b = factor_axes(axes[path])
        change = jnp.einsum(
            a, names_a, b, names_b, tuple(range(x.ndim)), precision="highest"
        )
        return (x.astype(jnp.float32) + adapters.scale * change).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(merged, params)
