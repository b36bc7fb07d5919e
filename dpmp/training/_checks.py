"""What a trainer expects of what it is given, and what it says otherwise.

Messages name paths, types, shapes and dtypes. They never show a value.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpmp import _validate
from dpmp._numbers import as_number
from dpmp._typing import PyTree
from dpmp._warnings import warn
from dpmp.mechanism import DPSGD
from dpmp.precision import Policy
from dpmp.programs import _float8
from dpmp.training._batches import sampling_key
from dpmp.training._state import TrainingState

_RECIPES = "Recipes for Flax, Equinox, Haiku and Keras are in docs/recipes.md."


def check_types(*, mechanism: Any, optimizer: Any) -> None:
    """Raises ValueError for arguments of another type."""
    given = {"mechanism": mechanism, "optimizer": optimizer}
    for name, kind, fix in (
        ("mechanism", DPSGD, "Use dpmp.DPSGD(...).calibrate(epsilon=, delta=)."),
        ("optimizer", optax.GradientTransformation, "Use optax.adam(1e-3)."),
    ):
        _validate.require(
            isinstance(given[name], kind),
            f"{name} must be a {kind.__name__}",
            fix=fix,
            type=type(given[name]).__name__,
        )


def warn_of_policy(policy: Policy, loss_scale: Any) -> None:
    """Warns of a policy that is slow on this device or that trains little."""
    if policy.float8_scale is not None and not _float8.is_native():
        warn(
            "float8 products are emulated on this device: they are rounded as on a "
            "device with float8, but slower."
        )
    if loss_scale is None and policy.compute_dtype == jnp.float16:
        warn(
            "float16 gradients below 6e-8 become zero, which keeps small losses from "
            "training. Pass loss_scale=dpmp.loss_scaling.by_loss(), or a power of two."
        )


def warn_of_directory(state: TrainingState, restored: Any) -> None:
    """Warns of steps that the ledger of a restored state will not have.

    `restored` is None, or the sampling key of the state and its directory.
    """
    if restored is not None and sampling_key(state) == restored[0]:
        warn(
            f"the state is from {restored[1]}, whose ledger will not have the steps "
            "that are made now. If the run there was killed, they may add the noise of "
            f"lost steps to other sums. Pass checkpoint_dir={str(restored[1])!r}."
        )


def checked_stop(stop_at: Any, start: int, iterations: int) -> int:
    """The number of steps after which to stop, between `start` and `iterations`."""
    stop = iterations if stop_at is None else as_number(stop_at)
    _validate.require(
        _validate.is_integer(stop) and start <= stop <= iterations,
        f"stop_at must be from the current step to {iterations}",
        step=start,
        stop_at=stop,
        fix="Privacy is accounted for `iterations` steps. Plan more of them before "
        "the run starts.",
    )
    return stop


def check_options(callback: Any, sensitive_callback: Any, prefetch: Any) -> None:
    """Raises ValueError for an option of `fit` that is out of range."""
    given = {"callback": callback, "sensitive_callback": sensitive_callback}
    for name, function in given.items():
        _validate.require(
            function is None or callable(function),
            f"{name} must be a function of one argument",
            fix="Leave it out, or pass a function.",
            type=type(function).__name__,
        )
    _validate.nonnegative_integer(prefetch=prefetch, fix="Use 2, or 0 for no thread.")


def as_public(returned: Any) -> dict[str, float]:
    """The numbers that a callback returned, as floats; none for None.

    Raises:
      ValueError: for anything else. The message shows no value.
    """
    returned = {} if returned is None else returned
    is_dict = isinstance(returned, Mapping)
    _validate.require(
        is_dict and all(isinstance(name, str) for name in returned),
        "a callback must return None, or a dict from names to numbers that were "
        "computed from public data or from released values",
        type=type(returned).__name__,
        fix='Return {"accuracy": 0.9}, for example, or nothing.',
    )
    return {name: _as_public_number(name, x) for name, x in returned.items()}


def _as_public_number(name: str, x: Any) -> float:
    is_scalar = np.ndim(x) == 0 and hasattr(x, "__float__")
    _validate.require(
        is_scalar,
        "every number that a callback returns must be a real scalar",
        name=name,
        type=type(x).__name__,
        fix="Reduce arrays with jnp.mean, for example.",
    )
    return float(x)


def check_state(state: Any) -> None:
    """Raises ValueError for anything but a state whose counts of steps agree."""
    _validate.require(
        isinstance(state, TrainingState),
        "state must be a TrainingState",
        type=type(state).__name__,
        fix="Use trainer.init(params), or a state that was saved.",
    )
    _validate.require(
        not any(
            isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(state)
        ),
        "state must be the one that fit or train_step returned last",
        state="one whose arrays were reused by a later step",
        fix="Write state = trainer.fit(state, ...). Or start another run, which costs "
        "as well, with trainer.init.",
    )
    step, noise_step = int(state.step), int(state.noise_state.step)
    _validate.require(
        step == noise_step,
        "a state must have as many steps as its noise, so that all noise is accounted "
        "for and none is used twice",
        step=step,
        noise_step=noise_step,
        fix="Go on from a state as it was returned, or start another run with "
        "trainer.init.",
    )


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


def as_params(params: PyTree) -> PyTree:
    """The parameters as arrays; variables of Keras become their values.

    Raises:
      ValueError: for a leaf that is no float array, with its path.
    """
    params = jax.tree.map(_value, params)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    _validate.require(
        bool(leaves),
        "params must be a tree with float arrays",
        params=type(params).__name__,
        fix=_RECIPES,
    )
    for path, leaf in leaves:
        is_array = hasattr(leaf, "shape") or isinstance(leaf, float)
        _validate.require(
            is_array and jnp.issubdtype(jnp.result_type(leaf), jnp.floating),
            "every leaf of params must be a float array",
            leaf=jax.tree_util.keystr(path) or "(params itself)",
            type=jnp.result_type(leaf).name if is_array else type(leaf).__name__,
            fix="Keep everything else out of params, and let the loss close over it: "
            "nnx.split(model, nnx.Param, ...), or params, static = eqx.partition("
            "model, eqx.is_inexact_array) and eqx.combine(params, static) in the loss.",
        )
    return params


def _value(leaf: Any) -> Any:
    is_array = isinstance(leaf, jax.Array | np.ndarray)
    return leaf if is_array else getattr(leaf, "value", leaf)


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
