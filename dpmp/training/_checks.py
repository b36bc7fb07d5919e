"""Checks the arguments of a trainer, and says what to do about invalid ones.

Messages name paths, types, shapes and dtypes. They never show a value.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from dpmp import _validate
from dpmp._arrays import check_keys
from dpmp._typing import PyTree
from dpmp._validate import as_number, as_real
from dpmp._warnings import warn
from dpmp.loss_scaling import ScaledLoss
from dpmp.mechanism import DPSGD
from dpmp.precision import Policy, is_autocast
from dpmp.sources import check_sharding
from dpmp.training._state import Callback, SensitiveOutputs, TrainingState

_A_STATE = "Use trainer.init(params), or a state that was saved."
_COMPLEX = (
    "Make it two arrays, its real and its imaginary part, and let the loss join them "
    "with jax.lax.complex."
)
_NO_FLOAT = (
    "Keep everything else out of params, and let the loss close over it: "
    "nnx.split(model, nnx.Param, ...), or params, static = eqx.partition(model, "
    "eqx.is_inexact_array) and eqx.combine(params, static) in the loss."
)


def check_types(
    mechanism: Any, loss_fn: Any, optimizer: Any, uses_prng_key: Any
) -> None:
    """Raises ValueError for arguments of a wrong type."""
    if isinstance(loss_fn, ScaledLoss):
        _validate.fail(
            "loss_fn must be without a scale. Pass the loss itself, and the scale as "
            "loss_scale=.",
            type="ScaledLoss",
        )
    fix = "Use dpmp.DPSGD(...).calibrate(...)."
    _validate.instance(DPSGD, fix, mechanism=mechanism)
    fix = "Use optax.adam(1e-3), for example. Of optax.MultiSteps, pass what its "
    fix += "gradient_transformation() returns; larger batches have less noise."
    _validate.instance(optax.GradientTransformation, fix, optimizer=optimizer)
    _validate.boolean(uses_prng_key=uses_prng_key)


def warn_of_policy(policy: Policy, loss_scale: Any, loss_fn: Any) -> None:
    """Warns of a policy that is slow on this device, trains little or is no help."""
    if is_autocast(loss_fn) and policy.compute_dtype.itemsize == 2:
        warn(
            "loss_fn is the result of dpmp.autocast, but the policy rounds parameters "
            "and inputs to 16 bits before, so that sums and exponentials are not in "
            'float32. Use policy="float32".'
        )
    if policy.is_emulated:
        warn(
            "products of few bits are emulated on this device: operands and cotangents "
            "are rounded, and multiplied in a wider dtype, which is slower."
        )
    if loss_scale is None and policy.compute_dtype == jnp.float16:
        warn(
            "float16 gradients below 6e-8 become zero, which keeps small losses from "
            "training. Pass loss_scale=dpmp.loss_scaling.by_loss(), or a power of two."
        )


def checked_stop(stop_at: Any, state: Any, iterations: int) -> int:
    """The number of steps after which to stop.

    It may be below that of the state: a program that is started again goes through its
    epochs from the first one.
    """
    check_state(state)
    stop, start = iterations if stop_at is None else as_number(stop_at), int(state.step)
    if not (_validate.is_integer(stop) and 0 <= stop <= iterations >= start):
        _validate.fail(
            f"stop_at must be from 0 to {iterations}, and the state have no more "
            "steps. Privacy is accounted for `iterations` steps. Plan more of them "
            "before the run starts.",
            step=start,
            stop_at=stop,
        )
    return stop


def check_next_step(mechanism: DPSGD, state: Any, batch: PyTree = None) -> None:
    """Raises ValueError unless a step alone, without `fit`, may follow a state."""
    # Secrets that only `fit` keeps tie the steps of other mechanisms together.
    if not mechanism.makes_steps_alone:
        _validate.fail(
            "random allocation and correlated noise tie steps together, so fit must "
            "make them. Use trainer.fit, or leave sampling and strategy out.",
            sampling=mechanism.sampling,
            strategy=mechanism.strategy,
        )
    check_state(state, batch)
    if int(state.step) >= mechanism.iterations:
        _validate.fail(
            f"step must be below iterations = {mechanism.iterations}. Plan more "
            "iterations before the run starts.",
            step=int(state.step),
        )


def check_batch(batch: Any, step: int, mechanism: DPSGD) -> None:
    """Raises ValueError unless `train_step` may use a `Batch` after `step` steps."""
    drawn_by = batch.mechanism.batch_selection_strategy, batch.mechanism.num_examples
    if batch.ticket.step != step or drawn_by != (
        mechanism.batch_selection_strategy,
        mechanism.num_examples,
    ):
        _validate.fail(
            "a batch must be drawn by the mechanism, and for the state, that it is "
            "used with. Use trainer.train_step(state, trainer.load_batch(state, "
            "data)).",
            batch_of_step=batch.ticket.step,
            step=step,
        )


def as_public(returned: Any) -> dict[str, float]:
    """The numbers that a callback returned, as floats; none for None."""
    returned = {} if returned is None else returned
    if not isinstance(returned, Mapping) or not all(
        isinstance(x, str) for x in returned
    ):
        _validate.fail(
            "a callback must return None, or a dict from names to numbers that were "
            'computed from public data or from released values. Return {"accuracy": '
            "0.9}, for example, or nothing.",
            type=type(returned).__name__,
        )
    for name, x in returned.items():
        if not _is_real_scalar(x):
            _validate.fail(
                "every number that a callback returns must be a real scalar. Reduce "
                "arrays with jnp.mean, for example.",
                name=name,
                type=type(x).__name__,
            )
    return {name: as_real(x) for name, x in returned.items()}


def _is_real_scalar(x: Any) -> bool:
    # `float` would take these, and drop a mask or an imaginary part.
    kind = getattr(getattr(x, "dtype", None), "kind", None)
    is_other = isinstance(x, str | bytes | np.ma.MaskedArray)
    if is_other or kind in ("c", "S", "U"):
        return False
    try:
        float(x)
    except OverflowError:  # an integer
        return True
    except (TypeError, ValueError):
        return False
    return np.ndim(x) == 0


def is_used_up(state: Any) -> bool:
    """Whether a step has reused arrays of a state, or somebody has deleted them."""
    arrays = (x for x in jax.tree.leaves(state) if isinstance(x, jax.Array))
    return any(not isinstance(x, jax.core.Tracer) and x.is_deleted() for x in arrays)


def check_is_state(state: Any) -> None:
    """Raises ValueError for what is not the state of a trainer."""
    _validate.instance(TrainingState, _A_STATE, state=state)


def check_state(state: Any, batch: PyTree = None) -> None:
    """Raises ValueError for an invalid or donated state, and in traced functions."""
    check_is_state(state)
    arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
    others = [*jax.tree.leaves(batch), jnp.zeros(())]  # inside of jit, it is traced
    if any(isinstance(x, jax.core.Tracer) for x in (*arrays, *others)):
        _validate.fail(
            "steps must be made outside of jax.jit, vmap, scan and other "
            "transformations, so that each has random bits of its own. Call fit or "
            "train_step in an ordinary loop. A step is compiled anyway.",
            traced=True,
        )
    if is_used_up(state):
        _validate.fail(
            "state must be the one that fit or train_step returned last. Write state "
            "= trainer.fit(state, ...). Or start another run, which costs as well, "
            "with trainer.init.",
            state="one whose arrays were reused by a later step",
        )
    step = np.asarray(state.step)
    is_integer = step.shape == () and np.issubdtype(step.dtype, np.integer)
    if not is_integer or int(step) < 0:
        _validate.fail(
            f"state.step must be the number of steps made. {_A_STATE}",
            dtype=step.dtype.name,
        )


def as_params(params: PyTree) -> PyTree:
    """The parameters as arrays; variables of Keras become their values."""
    check_keys("params", params)
    params = jax.tree.map(_value, params)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        _validate.fail(
            "params must be a tree with float arrays. Recipes for Flax, Equinox, "
            "Haiku and Keras are in docs/recipes.md.",
            params=type(params).__name__,
        )
    for path, leaf in leaves:
        dtype = getattr(leaf, "dtype", None) if hasattr(leaf, "shape") else None
        dtype = jnp.dtype(jnp.float32) if isinstance(leaf, float) else dtype
        is_complex = dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            _validate.fail(
                "every leaf of params must be a float array",
                fix=_COMPLEX if is_complex else _NO_FLOAT,
                leaf=jax.tree_util.keystr(path) or "(params itself)",
                type=type(leaf).__name__ if dtype is None else str(dtype),
            )
        if isinstance(leaf, jax.ShapeDtypeStruct):
            _validate.fail(
                "params must be arrays. Initialise the model first.",
                leaf=jax.tree_util.keystr(path),
                type="ShapeDtypeStruct",
            )
    places = [getattr(x, "sharding", None) for _, x in leaves]
    meshes = {x.mesh for x in places if isinstance(x, jax.NamedSharding)}
    if len(meshes) > 1:
        _validate.fail(
            "all params must be sharded over one mesh. Put them on it by "
            "jax.device_put.",
            meshes=[dict(mesh.shape) for mesh in meshes],
        )
    return params


def check_finite(params: PyTree) -> None:
    """Raises ValueError if initial parameters, which are public, are not finite."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    arrays = [x for _, x in leaves]
    if any(isinstance(x, jax.core.Tracer) for x in arrays) or any(
        not getattr(x, "is_fully_addressable", True) for x in arrays
    ):
        return
    finite = jax.jit(lambda xs: jnp.stack([jnp.isfinite(x).all() for x in xs]))(arrays)
    if not np.all(finite):
        _validate.fail(
            "params must be finite: with NaN, no example would contribute anything. "
            "Initialise the model again.",
            leaves=[
                jax.tree_util.keystr(path)
                for (path, _), is_finite in zip(leaves, np.asarray(finite), strict=True)
                if not is_finite
            ],
        )


def _value(leaf: Any) -> Any:
    is_array = isinstance(leaf, jax.Array | np.ndarray)
    return leaf if is_array else getattr(leaf, "value", leaf)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `DPTrainer.fit`, which documents them."""

    mechanism: DPSGD
    stop: int
    batch_sharding: Any
    callback: Callback | None
    sensitive_callback: Callable[[SensitiveOutputs], None] | None
    progress: bool
    checkpoint_dir: Any
    every: int
    keep: int
    epsilon_budget: float | None
    prefetch: int

    def __post_init__(self):
        _validate.fields(
            self,
            callback=_validate.optional(partial(_validate.function, "state")),
            sensitive_callback=_validate.optional(
                partial(_validate.function, "outputs")
            ),
            progress=_validate.boolean,
            prefetch=_validate.nonnegative_integer,
            every=_validate.positive_integer,
            keep=_validate.positive_integer,
            epsilon_budget=_validate.optional(_validate.positive),
        )
        check_sharding(self.batch_sharding, self.mechanism)
        has_both = None not in (self.checkpoint_dir, self.mechanism.delta)
        if self.epsilon_budget is not None and not has_both:
            _validate.fail(
                "a budget needs a directory, whose ledger has all steps, and a delta. "
                "Pass checkpoint_dir too, and use mechanism.calibrate(epsilon=, "
                "delta=), or DPSGD(delta=).",
                checkpoint_dir=self.checkpoint_dir,
                delta=self.mechanism.delta,
            )

    @property
    def plan(self) -> tuple[Any, ...]:
        """The options that all processes of a job must share."""
        has_directory = self.checkpoint_dir is not None
        files = self.every, self.keep, has_directory
        # Tickets are drawn ahead as far as batches are.
        return self.stop, self.prefetch, self.epsilon_budget, *files
