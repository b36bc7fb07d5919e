"""What does each precision cost in accuracy, with privacy and without?

Two tasks (`accuracy_tasks.py`) are trained in every precision from several seeds, with
DP-SGD at epsilon 8 and delta 1e-5, and once more without clipping and noise. A seed
decides on batches and noise, alike in all rows but the naive one (which has others),
and on the digits' initial parameters; what seeds do to float32 is what a difference
between precisions has to be held against.

    float32, tf32    the reference; TF32 where the device has it
    bf16 naive       all of DP-SGD in bfloat16 (`naive.py`), which dpmp refuses
    mixed_bfloat16   the policy of that name
    autocast         the float32 policy, and the loss under `dpmp.autocast`
    fp16 ...         the policy "mixed_float16": without a loss scale, with a constant
                     one, and with `dpmp.loss_scaling.DynamicScale`
    ... averages     Adam's averages are narrower: the first one in bfloat16
                     (`mu_dtype`), or both in 8 bits (`dpmp.in_8_bits`)
    bf16 parameters  stored in bfloat16, by stochastic rounding

The transformer is also trained by LoRA, under "mixed_bfloat16" alone, with a frozen
base in bfloat16, or of integers with scales.

The loss is a sum over predictions, divided by 2^22, as in training loops that average
over the millions of tokens of a batch. Clip norms have the same factor, and the
optimizer takes it out again in float32, so that in exact arithmetic nothing would
change. In float16, which has nothing below 6e-8, it does.

A line has the score on held-out data, computed in float32 in all rows, the bytes that a
parameter and its averages take between steps, and the share of updates, not zero, that
did not change the parameter they were added to. All data here
are public, as such figures ask for.

Learning rates are Adam's customary 1e-3 or twice that, where bfloat16 parameters lose
half of the updates or more; on digits, the naive row is no worse than float32 with 100
private steps at 5e-3. The dynamic scale doubles every 10 steps (by default, 100), to be
seen to move; at the end of the digits' 300 steps, one or two examples of a batch
overflow, and contribute nothing.

    python -m benchmarks.accuracy_by_precision           # half an hour on two cores
    python -m benchmarks.accuracy_by_precision --task digits --row float32 tf32
"""

import functools
import time
import warnings
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import dpmp
from benchmarks import accuracy_tasks, harness, naive
from dpmp.loss_scaling import DynamicScale

EPSILON, DELTA = 8.0, 1e-5
TASKS = {"digits": accuracy_tasks.digits, "transformer": accuracy_tasks.transformer}
ADAPTERS = {
    f"adapters, {kind} base": functools.partial(accuracy_tasks.adapters, kind)
    for kind in ("bfloat16", "int8", "int4")
}


# Adapters of a language model of 135 million parameters: minutes for a run.
LARGE = {"SmolLM2 adapters": accuracy_tasks.smollm2_adapters}


class Row(NamedTuple):
    """A precision."""

    policy: str | dpmp.Policy | None  # None for the naive trainer
    loss_scale: Any = None  # as in `dpmp.DPTrainer`
    is_autocast: bool = False  # the loss is under `dpmp.autocast`
    adam: Any = optax.adam  # from learning rates


def _adam_in_8_bits(learning_rate: Any) -> optax.GradientTransformation:
    return dpmp.in_8_bits(optax.adam(learning_rate))


_ROUNDED = dpmp.Policy(jnp.bfloat16, jnp.bfloat16, stochastic_rounding=True)
_NARROW_ADAM = functools.partial(optax.adam, mu_dtype=jnp.bfloat16)
ROWS = {
    "float32": Row("float32"),
    "tf32": Row("tf32"),
    "bf16 naive": Row(None),
    "mixed_bfloat16": Row("mixed_bfloat16"),
    "autocast": Row("float32", is_autocast=True),
    "fp16 without scale": Row("mixed_float16"),
    "fp16 static scale": Row("mixed_float16", 2.0**24),
    "fp16 dynamic scale": Row("mixed_float16", DynamicScale(growth_interval=10)),
    "bf16 average": Row("mixed_bfloat16", adam=_NARROW_ADAM),
    "8-bit averages": Row("mixed_bfloat16", adam=_adam_in_8_bits),
    "bf16 parameters": Row(_ROUNDED),
    "bf16 parameters, 8-bit averages": Row(_ROUNDED, adam=_adam_in_8_bits),
}


def count_lost_updates() -> optax.GradientTransformation:
    """Changes nothing; its state has the sum, over steps, of shares rounded away."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        moved = optax.apply_updates(params, updates)
        lost = jax.tree.map(
            lambda x, new, old: jnp.sum((x != 0) & (new == old)), updates, moved, params
        )
        nonzero = sum(jax.tree.leaves(jax.tree.map(jnp.count_nonzero, updates)))
        share = jnp.float32(sum(jax.tree.leaves(lost))) / jnp.maximum(nonzero, 1)
        return updates, (state[0] + share, state[1] + 1)

    def init(params: Any) -> tuple[jax.Array, jax.Array]:
        del params
        return jnp.float32(0), jnp.int32(0)

    return optax.GradientTransformation(init, update)


def train(
    task: accuracy_tasks.Task, row: Row, mechanism: dpmp.DPSGD, initial: Any, seed: int
) -> tuple[Any, Any, float]:
    """The parameters in float32, the state of the optimizer and the last loss scale."""
    fun = dpmp.autocast(task.loss_fn) if row.is_autocast else task.loss_fn
    # Adam has gradients of the loss without its weight.
    optimizer = optax.chain(
        optax.scale(1 / task.loss_weight),
        row.adam(optax.linear_schedule(task.learning_rate, 0, task.steps)),
        count_lost_updates(),
    )
    options: Any = {
        "mechanism": mechanism,
        "loss_fn": lambda params, batch: task.loss_weight * fun(params, batch),
        "optimizer": optimizer,
    }
    if row.policy is None:
        params, opt_state = naive.train(
            **options, params=initial, data=task.train, seed=seed
        )
        return jax.tree.map(lambda x: x.astype(jnp.float32), params), opt_state, 1.0
    with warnings.catch_warnings():
        # One row has to show what the warning is about.
        warnings.filterwarnings("ignore", "float16 gradients below 6e-8")
        trainer = dpmp.DPTrainer(
            **options,
            policy=row.policy,
            loss_scale=row.loss_scale,
            # Anyone can guess it: these runs are to be compared, not released.
            prng_key=jax.random.key(seed),
        )
    state = trainer.fit(trainer.init(initial), task.train, progress=False)
    is_dynamic = state.scale_state is not None
    scale = state.scale_state.scale if is_dynamic else row.loss_scale or 1.0
    return state.params, state.opt_state, float(scale)


@functools.cache
def prepare(
    name: str, steps: int | None, dtype: Any = jnp.bfloat16
) -> tuple[accuracy_tasks.Task, dpmp.DPSGD]:
    """A task, and DP-SGD for its loss with its weight; `dtype` is of a frozen base."""
    is_large = name in LARGE
    task = LARGE[name](dtype) if is_large else (TASKS | ADAPTERS)[name]()
    task = task._replace(steps=steps or task.steps)
    mechanism = dpmp.DPSGD(
        num_examples=len(jax.tree.leaves(task.train)[0]),
        expected_batch_size=task.batch_size,
        iterations=task.steps,
        l2_clip_norm=task.l2_clip_norm * task.loss_weight,
        microbatch_size=task.microbatch_size,
        num_parameters=sum(x.size for x in jax.tree.leaves(task.initial_params(0))),
    )
    return task, mechanism.calibrate(epsilon=EPSILON, delta=DELTA)


def _num_bytes(x: jax.Array) -> float:
    bits = 4 if x.dtype == jnp.int4 else 8 * x.dtype.itemsize  # as on accelerators
    return x.size * bits / 8


def benchmark(
    task: Annotated[str, harness.Each([*TASKS, *ADAPTERS])],
    row: Annotated[str, harness.Each(ROWS)],
    seed: Annotated[int, harness.Each(default=(0, 1, 2))],
    steps: int | None = None,
) -> harness.Lines:
    """A line for each task, precision and seed, with privacy and without."""
    if row == "tf32" and jax.default_backend() == "cpu":
        return
    if task in ADAPTERS and row != "mixed_bfloat16":
        return
    made, private = prepare(task, steps)
    for mechanism in (private, private.without_privacy()):
        is_private, start = mechanism.is_private, time.perf_counter()
        initial = made.initial_params(seed)
        params, opt_state, scale = train(made, ROWS[row], mechanism, initial, seed)
        score = made.evaluate(jax.tree.map(lambda x: x.astype(jnp.float32), params))
        seconds = time.perf_counter() - start
        total_lost, num_steps = opt_state[-1]
        dense = params if made.base is None else dpmp.lora.merge(made.base, params)
        size = sum(x.size for x in jax.tree.leaves(dense))
        stored = jax.tree.leaves((params, opt_state, made.base))
        yield {
            "metric": made.metric,
            "is_private": is_private,
            "steps": made.steps,
            "epsilon": mechanism.guarantee().epsilon if is_private else None,
            "loss_weight": made.loss_weight,
            "noise_multiplier": mechanism.noise_multiplier,
            "score": score,
            "score_before": made.evaluate(initial),
            "loss_scale": scale,
            "bytes_per_parameter": round(sum(map(_num_bytes, stored)) / size, 2),
            "lost_updates": float(total_lost) / int(num_steps),
            "seconds": round(seconds, 1),
        }


if __name__ == "__main__":
    harness.main(benchmark, tiny={"task": ["digits"], "seed": [0], "steps": 3})
