"""What a loss of a user must be, and what an error in it says.

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
    except (TypeError, ValueError):  # some callables have none
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
    """The loss, with an error for a result that is not a scalar loss."""

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
    """Adds to an error in the loss what the loss was given, and a likely way out."""
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

# By the names of exceptions, and by a part of their messages, so that no other library
# has to be imported.
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
