"""Checks of the functions and arguments that clipping is given."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpmp import _validate
from dpmp._numbers import as_number
from dpmp._typing import PyTree


def as_argnums(name: str, argnums: Any) -> tuple[int, ...]:
    """One position or several, as a tuple."""
    as_tuple = tuple(argnums) if isinstance(argnums, tuple | list) else (argnums,)
    as_tuple = tuple(map(as_number, as_tuple))
    _validate.require(
        len(as_tuple) > 0 and all(_validate.is_integer(i) and i >= 0 for i in as_tuple),
        f"{name} must be one or more positions, counted from 0",
        fix="Negative positions are not supported.",
        argnums=argnums,
    )
    return as_tuple


def check_disjoint(
    argnums: tuple[int, ...], batch_argnums: tuple[int, ...], prng_argnum: int | None
) -> None:
    """Raises ValueError for an argument with two meanings."""
    keys = () if prng_argnum is None else as_argnums("prng_argnum", prng_argnum)
    positions = (*argnums, *batch_argnums, *keys)
    _validate.require(
        len(set(positions)) == len(positions),
        "argnums, batch_argnums and prng_argnum must not overlap",
        argnums=argnums,
        batch_argnums=batch_argnums,
        prng_argnum=prng_argnum,
        fix="An argument is differentiated, or batched, or a key.",
    )


def check_num_args(args: Sequence[Any], argnums: tuple[int, ...]) -> None:
    """Raises ValueError unless all of `argnums` are positions of arguments."""
    _validate.require(
        len(args) > max(argnums),
        f"there must be at least {max(argnums) + 1} positional arguments",
        num_args=len(args),
        fix="Pass the arguments that argnums name by position.",
    )


def batch_sizes(
    args: Sequence[Any], batch_argnums: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """The sizes of the leading axes of batched arguments, by name; () for none."""
    return {
        f"argument {i}{jax.tree_util.keystr(path)}": jnp.shape(leaf)[:1]
        for i in batch_argnums
        for path, leaf in jax.tree_util.tree_leaves_with_path(args[i])
    }


def common_batch_size(sizes: dict[str, tuple[int, ...]]) -> int:
    """The one size that all have; raises ValueError if there is none."""
    _validate.require(
        len(set(sizes.values())) == 1 and () not in sizes.values(),
        "all batched arguments must have one leading axis of the same size",
        sizes=sizes,
        fix="Stack the examples along axis 0, or correct batch_argnums.",
    )
    ((batch_size,),) = set(sizes.values())
    return batch_size


def of_one_example(
    batch_argnums: Sequence[int], keep_batch_dim: bool
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator for functions to (value, aux), so that they take one example.

    With `keep_batch_dim` they are given it as a batch of one, and what has that axis
    among the auxiliary outputs loses it.
    """

    def decorate(fun: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fun)
        def with_batch_of_one(*args: Any, **kwargs: Any) -> Any:
            value, aux = fun(
                *(
                    jax.tree.map(lambda x: x[None], arg) if i in batch_argnums else arg
                    for i, arg in enumerate(args)
                ),
                **kwargs,
            )
            return value, jax.tree.map(_drop_batch_of_one, aux)

        return with_batch_of_one if keep_batch_dim else fun

    return decorate


def _drop_batch_of_one(x: Any) -> Any:
    return x[0] if jnp.ndim(x) and jnp.shape(x)[0] == 1 else x


def check_float_leaves(tree: PyTree, name: str) -> None:
    """Raises ValueError, naming the leaf, for what cannot be clipped."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    _validate.require(
        len(leaves) > 0,
        f"{name} must hold at least one array",
        tree=jax.tree.structure(tree),
        fix="Correct argnums, or what the function returns.",
    )
    for path, leaf in leaves:
        dtype = jnp.result_type(leaf)
        _validate.require(
            jnp.issubdtype(dtype, jnp.floating),
            f"every leaf of {name} must be a real float array",
            leaf=jax.tree_util.keystr(path),
            dtype=dtype.name,
            fix="Keep integers and other values in an argument of their own; split "
            "complex values into real and imaginary parts.",
        )


def check_loss(value: Any) -> None:
    """Raises ValueError unless `value` can be differentiated."""
    shape, dtype = jnp.shape(value), jnp.result_type(value)
    _validate.require(
        shape == () and jnp.issubdtype(dtype, jnp.floating),
        "fun must return a scalar float loss for one example",
        shape=shape,
        dtype=dtype.name,
        fix="Reduce it with jnp.mean or jnp.sum; return other values as aux.",
    )


def unpack_aux(output: Any) -> tuple[Any, Any]:
    """The two parts of what a function with `has_aux` returns."""
    _validate.require(
        isinstance(output, tuple) and len(output) == 2,
        "with has_aux=True fun must return a pair (value, aux)",
        output=type(output).__name__,
        fix="Return two values, or leave has_aux out.",
    )
    return output
