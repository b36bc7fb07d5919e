"""The precisions to train in, and what is measured of the gradients of each."""

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpmp
from benchmarks import accuracy_tasks, naive
from dpmp.loss_scaling import DynamicScale, ScaledLoss


class Row(NamedTuple):
    """A precision.

    Attributes:
      policy: the name of a `dpmp.Policy`; None for the naive trainer.
      loss_scale: as in `dpmp.DPTrainer`.
      is_autocast: whether the loss is under `dpmp.autocast`.
    """

    policy: str | None
    loss_scale: Any = None
    is_autocast: bool = False


ROWS = {
    "float32": Row("float32"),
    "tf32": Row("tf32"),
    "bf16 naive": Row(None),
    "mixed_bfloat16": Row("mixed_bfloat16"),
    "autocast": Row("float32", is_autocast=True),
    "fp16 without scale": Row("mixed_float16"),
    "fp16 static scale": Row("mixed_float16", 2.0**24),
    "fp16 dynamic scale": Row("mixed_float16", DynamicScale(growth_interval=10)),
}


class Run(NamedTuple):
    """What is trained once for each seed."""

    task: accuracy_tasks.Task
    row: Row
    mechanism: dpmp.DPSGD

    @property
    def policy(self) -> dpmp.Policy:
        """Of the computation; parameters of the naive trainer are bfloat16 as well."""
        return dpmp.Policy.from_name(self.row.policy or "mixed_bfloat16")

    @property
    def loss_fn(self) -> naive.LossFn:
        """What is differentiated."""
        fun = self.task.loss_fn
        fun = dpmp.autocast(fun) if self.row.is_autocast else fun
        return lambda params, batch: self.task.loss_weight * fun(params, batch)

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """Adam for gradients of the loss without its weight."""
        task = self.task
        schedule = optax.linear_schedule(task.learning_rate, 0, task.steps)
        return optax.chain(
            optax.scale(1 / task.loss_weight),
            optax.adam(schedule),
            count_lost_updates(),
        )


class Trained(NamedTuple):
    """What came out of a run.

    Attributes:
      params: in float32.
      lost_updates: the share that `count_lost_updates` found.
      loss_scale: at the end.
    """

    params: Any
    lost_updates: float
    loss_scale: float


def count_lost_updates() -> optax.GradientTransformation:
    """Changes nothing; its state has the sum, over steps, of shares rounded away."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        assert params is not None
        share = _share_of_nonzero(
            lambda new, old: new == old,
            updates,
            optax.apply_updates(params, updates),
            params,
        )
        return updates, (state[0] + share, state[1] + 1)

    def init(params: Any) -> tuple[jax.Array, jax.Array]:
        del params
        return jnp.float32(0), jnp.int32(0)

    return optax.GradientTransformation(init, update)


def _share_of_nonzero(is_lost: Any, reference: Any, *trees: Any) -> jax.Array:
    """Of the entries where `reference` is not zero, those that are lost."""
    lost = jax.tree.map(
        lambda x, *leaves: jnp.sum((x != 0) & is_lost(*leaves)), reference, *trees
    )
    nonzero = jax.tree.map(jnp.count_nonzero, reference)
    total = sum(jax.tree.leaves(nonzero))
    return jnp.float32(sum(jax.tree.leaves(lost))) / jnp.maximum(total, 1)


def make_trainer(run: Run) -> Callable[[Any, int], Trained]:
    """A function of initial parameters and a seed."""
    if run.row.policy is None:
        return _make_naive_trainer(run)

    def train(params: Any, seed: int) -> Trained:
        with warnings.catch_warnings():
            # One row has to show what the warning is about.
            warnings.filterwarnings("ignore", "float16 gradients below 6e-8")
            trainer = dpmp.DPTrainer(
                mechanism=run.mechanism,
                loss_fn=run.loss_fn,
                optimizer=run.optimizer,
                policy=run.policy,
                loss_scale=run.row.loss_scale,
                # Anyone can guess it: these runs are to be compared, not released.
                prng_key=jax.random.key(seed),
            )
        state = trainer.init(params)
        state = trainer.fit(state, run.task.train, progress=False)
        scale = run.row.loss_scale or 1.0
        if state.scale_state is not None:
            scale = state.scale_state.scale
        return Trained(state.params, _lost_updates(state.opt_state), float(scale))

    return train


def _make_naive_trainer(run: Run) -> Callable[[Any, int], Trained]:
    trainer = naive.NaiveTrainer(
        mechanism=run.mechanism, loss_fn=run.loss_fn, optimizer=run.optimizer
    )

    def train(params: Any, seed: int) -> Trained:
        params, opt_state = trainer.fit(params, run.task.train, seed=seed)
        params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        return Trained(params, _lost_updates(opt_state), 1.0)

    return train


def _lost_updates(opt_state: Any) -> float:
    total, steps = opt_state[-1]
    return float(total) / int(steps)


# From float32 parameters, examples and a loss scale to a figure.
Check = Callable[[Any, Any, float], float]


def make_checks(run: Run) -> dict[str, Check]:
    """What is measured of parameters; the last needs a mechanism that clips."""
    return {
        "lost_gradients": _make_lost_gradient_check(run),
        "largest_contribution": _make_contribution_check(run),
    }


def _make_lost_gradient_check(run: Run) -> Check:
    """The share of entries of per-example gradients that only float32 has."""

    @jax.jit
    def share(params, examples, scale):
        wide = _per_example_grads(run.task.loss_fn, params, examples)
        narrow = _per_example_grads(
            lambda *args: scale * run.policy.in_product_precision(run.loss_fn)(*args),
            run.policy.cast_to_compute(params),
            run.policy.cast_inputs(examples),
        )
        return _share_of_nonzero(lambda x: x == 0, wide, narrow)

    return lambda params, examples, scale: float(share(params, examples, scale))


def _per_example_grads(loss_fn: naive.LossFn, params: Any, examples: Any) -> Any:
    def grad(example):
        return jax.grad(loss_fn)(params, jax.tree.map(lambda x: x[None], example))

    return jax.vmap(grad)(examples)


def _make_contribution_check(run: Run) -> Check:
    """The largest contribution of an example to the sum, over the clip norm."""
    is_naive = run.row.policy is None
    norms = _naive_norms(run) if is_naive else _norms_on_grid(run)
    return lambda *args: max(norms(*args)) / run.mechanism.l2_clip_norm


def _naive_norms(run: Run) -> Callable[..., list[float]]:
    """Norms of what the naive trainer sums, from the squares of float64 numbers."""

    @jax.jit
    def clipped_grads(params, examples):
        params, examples = naive.to_bfloat16((params, examples))
        return naive.clipped_grads(
            run.loss_fn, params, examples, run.mechanism.l2_clip_norm
        )

    def norms(params, examples, scale):
        del scale  # there is none
        leaves = jax.tree.leaves(clipped_grads(params, examples))
        wide = [np.asarray(x, np.float64).reshape(len(x), -1) for x in leaves]
        return np.linalg.norm(np.concatenate(wide, axis=1), axis=1).tolist()

    return norms


def _norms_on_grid(run: Run) -> Callable[..., list[float]]:
    """Norms of sums of one example each, integers times a unit."""
    mechanism = dataclasses.replace(run.mechanism, microbatch_size=None)
    loss_fn = run.policy.in_product_precision(run.loss_fn)

    @jax.jit
    def clipped_sum(params, example, scale):
        grad_fn = mechanism.clipped_grad(ScaledLoss(loss_fn, scale))
        example = jax.tree.map(lambda x: x[None], run.policy.cast_inputs(example))
        return grad_fn(run.policy.cast_to_compute(params), example)

    def norm(total):
        leaves = jax.tree.leaves(total, is_leaf=lambda x: isinstance(x, dpmp.GridArray))
        squares = (int(np.sum(np.asarray(x.counts, np.int64) ** 2)) for x in leaves)
        units = (x.unit for x in leaves)
        return math.sqrt(
            math.fsum(s * u * u for s, u in zip(squares, units, strict=True))
        )

    def norms(params, examples, scale):
        count = len(jax.tree.leaves(examples)[0])
        singles = [jax.tree.map(lambda x, i=i: x[i], examples) for i in range(count)]
        sums = [clipped_sum(params, x, jnp.float32(scale)) for x in singles]
        return [norm(x) * mechanism.expected_batch_size for x in sums]

    return norms
