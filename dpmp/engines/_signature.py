"""The roles of a function's arguments: parameters, a batch of examples, a key."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import _validate
from dpmp._arrays import as_device_dtypes, name_of
from dpmp._random import check_model_key
from dpmp._typing import PyTree
from dpmp._validate import as_number
from dpmp._warnings import warn


@dataclass(frozen=True)
class Signature:
    """The roles of a function's arguments, parsed once.

    The tuple `argnums` is empty if nothing is differentiated. `prng_argnum` is the
    position of a key that is split over the examples. The other attributes are those of
    `clipped_grad`.
    """

    argnums: int | tuple[int, ...]
    batch_argnums: tuple[int, ...]
    prng_argnum: int | None
    keep_batch_dim: bool
    has_aux: bool

    @classmethod
    def parse(
        cls,
        *,
        argnums: int | Sequence[int] | None = None,
        batch_argnums: int | Sequence[int],
        prng_argnum: int | None = None,
        keep_batch_dim: bool = True,
        has_aux: bool = False,
    ) -> "Signature":
        """Checks the positions that users pass; `argnums=None` means no parameters.

        Raises ValueError for a value that is not a position, or has two roles.
        """
        positions = () if argnums is None else _as_argnums("argnums", argnums)
        batched = _as_argnums("batch_argnums", batch_argnums)
        keys = () if prng_argnum is None else _as_argnums("prng_argnum", prng_argnum)
        every = (*positions, *batched, *keys)
        if len(set(every)) != len(every):
            _validate.fail(
                "argnums, batch_argnums and prng_argnum must not overlap. An argument "
                "is differentiated, or batched, or a key.",
                argnums=argnums,
                batch_argnums=batch_argnums,
                prng_argnum=prng_argnum,
            )
        is_single = not isinstance(argnums, tuple | list | None)
        params, key = every[0] if is_single else positions, keys[0] if keys else None
        return cls(params, batched, key, keep_batch_dim, has_aux)

    @property
    def of_params(self) -> tuple[int, ...]:
        """The positions of the parameters."""
        return (self.argnums,) if isinstance(self.argnums, int) else self.argnums

    @property
    def of_examples(self) -> tuple[int, ...]:
        """The positions of the arguments that differ between examples."""
        key = () if self.prng_argnum is None else (self.prng_argnum,)
        return (*self.batch_argnums, *key)

    def params(self, args: Sequence[Any]) -> PyTree:
        """Returns the parameters, in the tree structure of their gradient."""
        params = tuple(args[i] for i in self.of_params)
        return params[0] if isinstance(self.argnums, int) else params

    def examples(self, args: Sequence[Any], batch_size: int) -> dict[int, Any]:
        """Returns the arguments with an example axis, by position; the key is split."""
        examples = {i: args[i] for i in self.batch_argnums}
        if self.prng_argnum is not None:
            key = args[self.prng_argnum]
            check_model_key("the argument at prng_argnum", key)
            examples[self.prng_argnum] = jax.random.split(key, batch_size)
        return examples

    def with_arrays(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments, with a batch in dtypes of jax; see `as_device_dtypes`."""
        batch = {i: x for i, x in enumerate(args) if i in self.batch_argnums}
        batch = as_device_dtypes(batch)
        return tuple(batch.get(i, x) for i, x in enumerate(args))

    def check(self, args: Sequence[Any]) -> None:
        """Raises ValueError for missing positions and for non-float parameters."""
        check_num_args(args, (*self.of_params, *self.of_examples))
        for i in self.of_params:
            check_float_leaves(args[i], f"argument {i}")

    def warn_of_shared(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Warns of an argument that looks like a part of the batch, but is not one.

        Every example would see all of it, and one example would change all gradients.
        """
        named = (*self.of_params, *self.of_examples)
        sizes = _leading_sizes(args[self.batch_argnums[0]])
        if len(sizes) != 1 or sizes <= {0, 1}:
            return
        others = {i: x for i, x in enumerate(args) if i not in named} | kwargs
        for name, arg in others.items():
            if _leading_sizes(arg) == sizes:
                warn(
                    f"argument {name} has a leading axis like that of the batch, but "
                    "every example sees all of it, and the sensitivity does not cover "
                    "it. If it belongs to the batch, pass it by position, and name all "
                    "such positions in batch_argnums, or pass one dict for all. If it "
                    "is public, let the loss close over it."
                )

    def batch_size(
        self, args: Sequence[Any], is_padding_example: jax.Array | None = None
    ) -> int:
        """Returns the batch size; raises ValueError unless all arguments share it."""
        sizes = {
            f"argument {i}{jax.tree_util.keystr(path)}": jnp.shape(leaf)[:1]
            for i in self.batch_argnums
            for path, leaf in jax.tree_util.tree_leaves_with_path(args[i])
        }
        if is_padding_example is not None:
            sizes["is_padding_example"] = jnp.shape(is_padding_example)
            if jnp.result_type(is_padding_example) != jnp.dtype("bool"):
                _validate.fail(
                    "is_padding_example must be a bool array. Compare, as in `i < 0`.",
                    dtype=jnp.result_type(is_padding_example),
                )
        # The sizes are not shown: one of them may be the number of drawn examples.
        if len(set(sizes.values())) != 1 or () in sizes.values():
            _validate.fail(
                "all batched arguments must be arrays with one leading axis of the "
                "same size. Stack the examples along axis 0 (of lists, make arrays), "
                "pad them as the mask, or correct batch_argnums.",
                without_axis=[name for name, x in sizes.items() if not x][:4],
                of_equal_size=[
                    [name for name, x in sizes.items() if x == size]
                    for size in dict.fromkeys(filter(None, sizes.values()))
                ],
            )
        ((batch_size,),) = set(sizes.values())
        return batch_size

    def for_one_example(
        self, fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Callable[[PyTree, PyTree], Any], list[Any], dict[int, Any]]:
        """Turns `fun`, of one example's arguments, into a function of two trees.

        They are the parameters and the example, and are returned too: the parameters
        as they are, and the types of an example's part of the batch. All other
        arguments are constants of the function.
        """

        def of_trees(params: Sequence[Any], example: dict[int, Any]) -> Any:
            given = dict(enumerate(args))
            given |= zip(self.of_params, params, strict=True)
            return fun(*(given | example).values(), **kwargs)

        batched = {i: args[i] for i in self.of_examples}
        example = jax.tree.map(
            lambda x: jax.typeof(x).update(shape=jnp.shape(x)[1:]), batched
        )
        return of_trees, [args[i] for i in self.of_params], example

    def of_one_example(
        self, fun: Callable[..., Any], check: Callable[[Any], None]
    ) -> Callable[..., tuple[Any, PyTree]]:
        """Turns `fun` into a function of one example that returns (value, aux or None).

        With `keep_batch_dim`, `fun` receives a batch of one, and every auxiliary output
        with that axis loses it. `check` raises ValueError for an invalid value.
        """
        batched = self.batch_argnums if self.keep_batch_dim else ()

        def drop_batch_of_one(x: Any) -> Any:
            return x[0] if batched and jnp.shape(x)[:1] == (1,) else x

        @functools.wraps(fun)
        def value_and_aux(*args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
            given = [
                jax.tree.map(lambda x: x[None], arg) if i in batched else arg
                for i, arg in enumerate(args)
            ]
            output = fun(*given, **kwargs)
            if self.has_aux and (not isinstance(output, tuple) or len(output) != 2):
                _validate.fail(
                    "with has_aux=True fun must return a pair (value, aux). Return "
                    "two values, or leave has_aux out.",
                    output=type(output).__name__,
                )
            value, aux = output if self.has_aux else (output, None)
            check(value)
            return value, jax.tree.map(drop_batch_of_one, aux)

        return value_and_aux


def _leading_sizes(tree: PyTree) -> set[int]:
    """The sizes of the leading axes of all arrays; 0 for a leaf without axes."""
    return {(*getattr(x, "shape", ()), 0)[0] for x in jax.tree.leaves(tree)}


def _as_argnums(name: str, argnums: Any) -> tuple[int, ...]:
    """Turns one position, or several, into a tuple."""
    as_tuple = tuple(argnums) if isinstance(argnums, tuple | list) else (argnums,)
    as_tuple = tuple(map(as_number, as_tuple))
    if not as_tuple or not all(_validate.is_integer(i) and i >= 0 for i in as_tuple):
        _validate.fail(
            f"{name} must be one or more positions, counted from 0. Negative "
            "positions are not supported.",
            argnums=argnums,
        )
    return as_tuple


def check_num_args(args: Sequence[Any], argnums: tuple[int, ...]) -> None:
    """Raises ValueError unless every position in `argnums` has an argument."""
    if len(args) <= max(argnums):
        _validate.fail(
            f"there must be at least {max(argnums) + 1} positional arguments. Pass "
            "the arguments that argnums name by position.",
            num_args=len(args),
        )


def check_float_leaves(tree: PyTree, name: str) -> None:
    """Raises ValueError, with the name of the leaf, if a leaf cannot be clipped."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        _validate.fail(
            f"{name} must hold at least one array. Correct argnums, or what the "
            "function returns.",
            tree=jax.tree.structure(tree),
        )
    for path, leaf in leaves:
        # For other types, jax's own error would show the content of the leaf.
        of_number = np.dtype(float) if isinstance(leaf, float) else None
        dtype = getattr(leaf, "dtype", of_number)
        is_array = isinstance(dtype, np.dtype)
        type_name = name_of(dtype) if is_array else type(leaf).__name__
        if not is_array or not jnp.issubdtype(dtype, jnp.floating):
            _validate.fail(
                f"every leaf of {name} must be a real float array. Keep integers and "
                "other values in an argument of their own; split complex values into "
                "real and imaginary parts.",
                leaf=jax.tree_util.keystr(path),
                type=type_name,
            )


def check_loss(value: Any) -> None:
    """Raises ValueError unless `value` can be differentiated."""
    is_number = isinstance(value, int | float) or hasattr(value, "dtype")
    dtype = jnp.result_type(value) if is_number else np.dtype(object)
    if (
        not is_number
        or jnp.shape(value) != ()
        or not jnp.issubdtype(dtype, jnp.floating)
    ):
        _validate.fail(
            "fun must return a scalar float loss for one example. Reduce it with "
            "jnp.mean or jnp.sum; return other values as aux (has_aux).",
            loss=f"{dtype}{list(jnp.shape(value))}"
            if is_number
            else type(value).__name__,
        )
