"""Whole training steps, prepared and timed: what a user would run at each step.

A step has the gradients, clipping and noise if it is private, and Adam, for float32
parameters. Its loss runs in the dtypes of a policy of dpmp.
"""

import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpmp
from benchmarks import harness, models
from dpmp import book_keeping
from dpmp.engines._signature import Signature, check_loss
from dpmp.engines.book_keeping import _linalg
from dpmp.numerics._arithmetic import parse_arithmetic

GradFn = Callable[[Any, Any], Any]


class Step(NamedTuple):
    """A training step that is ready to run, and what the compiler of jax says of it."""

    run: Callable[[], Any]  # makes one step and returns what to wait for
    temp_bytes: int | None = None  # besides arguments and results
    compile_seconds: float | None = None  # with tracing


def measure(
    prepare: Mapping[str, Callable[[], Step]], rounds: int
) -> tuple[harness.Measured, dict[str, dict[str, Any]]]:
    """Prepares all steps, then runs them in turn.

    The figures are temporary memory, growth of the process (on a CPU, where it holds
    the arrays) and seconds to compile, and what was refused, with the reason.
    """
    steps, refused = {}, {}
    for name, make in prepare.items():
        try:
            with warnings.catch_warnings(action="ignore"):
                steps[name] = make()
                jax.block_until_ready(steps[name].run())
        except Exception as error:  # whatever a library raises, the others go on
            refused[name] = f"{type(error).__name__}: {str(error).strip()[:300]}"
            steps.pop(name, None)
    growth = {
        name: harness.growth_in_bytes(lambda s=step: jax.block_until_ready(s.run()))
        for name, step in steps.items()
        if jax.default_backend() == "cpu"
    }
    # The threads of PyTorch spin for a while after their last step of a round.
    calls = {"rest": lambda: time.sleep(0.1)} | {k: x.run for k, x in steps.items()}
    seconds = harness.in_turn(calls, rounds).seconds
    temporary = {k: x.temp_bytes for k, x in steps.items()}
    compiling = {k: x.compile_seconds for k, x in steps.items()}
    return harness.Measured({k: seconds[k] for k in steps}), {
        "temp_megabytes": harness.rounded(temporary, 2, unit=1e6),
        "growth_megabytes": harness.rounded(growth, 1, unit=1e6),
        "compile_seconds": harness.rounded(compiling, 1),
        "refused": refused,
    }


def of_gradients(
    grad_fn: GradFn,
    task: models.Task,
    policy: str,
    noise: optax.GradientTransformation | None = None,
) -> Step:
    """The step as people write it around a function for gradients."""
    compute_dtypes = dpmp.Policy.from_name(policy)
    optimizer = optax.chain(noise or optax.identity(), optax.adam(1e-3))

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        grads = grad_fn(compute_dtypes.cast_to_compute(params), batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        updates = jax.tree.map(lambda x: x.astype(jnp.float32), updates)
        return optax.apply_updates(params, updates), opt_state

    params = jax.tree.map(jnp.asarray, masters(task))
    # The state of the optimizer is float32 where gradients are narrower, too.
    state = params, optimizer.init(params)
    return _compiled(jax.jit(step, donate_argnums=0), state, task.batch)


def make_trainer(loss_fn: Any, policy: Any, **options: Any) -> dpmp.DPTrainer:
    """A trainer with Adam, and with these options of its mechanism."""
    return dpmp.DPTrainer(
        mechanism=dpmp.DPSGD(l2_clip_norm=1.0, noise_multiplier=1.0, **options),
        loss_fn=loss_fn,
        optimizer=optax.adam(1e-3),
        policy=policy,
    )


def of_dpmp(
    task: models.Task,
    policy: str,
    method: str,
    arithmetic: str,
    microbatch_size: int | None,
) -> Step:
    """The step of `DPTrainer`."""
    batch_size = len(jax.tree.leaves(task.batch)[0])
    params = masters(task)
    trainer = make_trainer(
        task.loss_fn,
        policy,
        num_examples=1000 * batch_size,
        expected_batch_size=0.8 * batch_size,
        truncated_batch_size=batch_size,
        microbatch_size=microbatch_size,
        iterations=10_000,  # fewer are made
        method=method,
        arithmetic=arithmetic,
        num_parameters=sum(x.size for x in jax.tree.leaves(params)),
    )
    state = trainer.init(params)._replace(spent=None)
    batch = jax.tree.map(jnp.asarray, task.batch)
    program, constants = trainer._step.make_program(state, batch)
    keys = list(jax.random.bits(jax.random.key(0), (3, 4), jnp.uint32))
    args = keys, batch, jnp.zeros(batch_size, bool), (), constants
    return _compiled(program, state, *args, next_state=lambda out: out[0])


def of_jax_privacy(task: models.Task, policy: str, microbatch_size: int | None) -> Step:
    """The step with the gradients and the noise of jax_privacy."""
    from jax_privacy import clipping, noise_addition

    grad_fn = clipping.clipped_grad(
        task.loss_fn,
        l2_clip_norm=1.0,
        normalize_by=len(jax.tree.leaves(task.batch)[0]),
        microbatch_size=microbatch_size,
    )
    stddev, key = grad_fn.sensitivity(), jax.random.key(0)
    noise = noise_addition.gaussian_privatizer(stddev=stddev, prng_key=key)
    return of_gradients(grad_fn, task, policy, noise)


def masters(task: models.Task) -> Any:
    """The parameters in float32, on the host."""
    return jax.tree.map(lambda x: np.asarray(x, np.float32), task.params)


def _compiled(
    program: Any,
    state: Any,
    *args: Any,
    next_state: Callable[[Any], Any] = lambda output: output,
) -> Step:
    """Compiles a function of (state, *args); each run goes on from the last state."""
    start = time.perf_counter()
    compiled = program.lower(state, *args).compile()
    seconds = time.perf_counter() - start
    held = [state]

    def run() -> Any:
        held[0] = next_state(compiled(held[0], *args))
        return held[0]

    return Step(run, compiled.memory_analysis().temp_size_in_bytes, seconds)


def without_privacy(loss_fn: Callable[..., jax.Array]) -> dict[str, GradFn]:
    """Gradients of the mean loss as fast as they can be had, by name.

    The gradient as people write it (`jax.grad`) is not always the fastest: XLA's
    compiler for CPUs is slow at products with a bfloat16 result, and small microbatches
    fit caches. Which one is the fastest depends on model and device.
    """
    fast = _linalg.adapted(jax.grad(loss_fn))
    return {
        "without privacy": fast,
        "without privacy, 8": _in_microbatches(fast, 8),
        "without privacy, book-kept": _unclipped(loss_fn),
    }


def _in_microbatches(grad_fn: GradFn, size: int) -> GradFn:
    """The mean of the gradients of parts of a batch, summed in float32."""

    def grad_of_all(params: Any, batch: Any) -> Any:
        parts = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), batch)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)

        def step(total: Any, part: Any) -> Any:
            grad = grad_fn(params, part)
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, grad), None

        total, _ = jax.lax.scan(step, zeros, parts)
        share = size / len(jax.tree.leaves(batch)[0])
        return jax.tree.map(lambda x: x * share, total)

    return grad_of_all


def _unclipped(loss_fn: Callable[..., jax.Array]) -> GradFn:
    """The mean gradient, by the sums of book-keeping."""
    signature = Signature.parse(argnums=0, batch_argnums=1)
    loss_of_one = signature.of_one_example(loss_fn, check_loss)
    engine = book_keeping.Engine(loss_of_one, signature, is_bounded=False)

    def grad_fn(params: Any, batch: Any) -> Any:
        size = len(jax.tree.leaves(batch)[0])
        coefs, keep = [jnp.full(size, 1 / size)], jnp.full(size, True)
        one_group, floats = jax.tree.structure(0), parse_arithmetic(None)
        return engine(params, batch).weighted_sum(coefs, keep, one_group, floats)

    return grad_fn
