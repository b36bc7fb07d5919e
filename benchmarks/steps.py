"""Whole training steps, prepared and timed: what a user would run at each step.

A step has the gradients, clipping and noise if it is private, and Adam, for float32
parameters. Its loss runs in the dtypes of a policy of dpmp.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpmp
from benchmarks import models, resident
from dpmp.tools import _timing

_STEPS = 10_000  # of the run that the mechanisms describe; fewer are made


class Step(NamedTuple):
    """A training step that is ready to run.

    Attributes:
      run: makes one step and returns what to wait for.
      temp_bytes: that the program allocates besides arguments and results, by the
        account of jax's compiler.
      compile_seconds: to trace and compile it, in jax.
    """

    run: Callable[[], Any]
    temp_bytes: int | None = None
    compile_seconds: float | None = None


class Measured(NamedTuple):
    """What steps take, by name.

    Attributes:
      seconds: in each round.
      figures: temporary memory, growth of the process (on a CPU, where it holds the
        arrays), and seconds to compile, for the steps that have them, and what was
        refused, with the reason.
    """

    seconds: dict[str, list[float]]
    figures: dict[str, dict[str, Any]]


def measure(prepare: Mapping[str, Callable[[], Step]], rounds: int) -> Measured:
    """Prepares all steps, then runs them in turn."""
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
        name: resident.growth_in_bytes(lambda s=step: jax.block_until_ready(s.run()))
        for name, step in steps.items()
        if jax.default_backend() == "cpu"
    }
    # The threads of PyTorch spin for a while after their last step of a round.
    calls = {"rest": lambda: time.sleep(0.1)} | {k: x.run for k, x in steps.items()}
    seconds = _timing.in_turn(calls, rounds)
    del seconds["rest"]
    figures = {
        "temp_megabytes": _rounded({k: x.temp_bytes for k, x in steps.items()}, 1e6),
        "growth_megabytes": _rounded(growth, 1e6),
        "compile_seconds": _rounded({k: x.compile_seconds for k, x in steps.items()}),
        "refused": refused,
    }
    return Measured(seconds, figures)


def _rounded(figures: Mapping[str, float | None], unit: float = 1) -> dict[str, float]:
    return {k: round(x / unit, 1) for k, x in figures.items() if x is not None}


def median_ms(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """The medians of the rounds, in milliseconds."""
    return {k: milliseconds(statistics.median(x)) for k, x in seconds.items()}


def milliseconds(seconds: float) -> float:
    """Rounded as lines have it."""
    return round(1e3 * seconds, 2)


def of_gradients(
    grad_fn: Callable[[Any, Any], Any],
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
    mechanism = dpmp.DPSGD(
        num_examples=1000 * batch_size,
        expected_batch_size=0.8 * batch_size,
        truncated_batch_size=batch_size,
        microbatch_size=microbatch_size,
        iterations=_STEPS,
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        method=method,
        arithmetic=arithmetic,
        num_parameters=sum(x.size for x in jax.tree.leaves(params)),
    )
    trainer = dpmp.DPTrainer(
        mechanism=mechanism,
        loss_fn=task.loss_fn,
        optimizer=optax.adam(1e-3),
        policy=policy,
    )
    state = trainer.init(params)._replace(spent=None)
    batch = jax.tree.map(jnp.asarray, task.batch)
    program, constants = trainer._step.make_program(state, batch)
    keys = list(jax.random.bits(jax.random.key(0), (3, 4), jnp.uint32))
    args = keys, batch, jnp.zeros(batch_size, bool), constants
    return _compiled(program, state, *args, next_state=lambda out: out[0])


def of_jax_privacy(task: models.Task, policy: str, microbatch_size: int | None) -> Step:
    """The step with the gradients and the noise of jax_privacy."""
    import jax_privacy.clipping
    import jax_privacy.noise_addition

    grad_fn = jax_privacy.clipping.clipped_grad(
        task.loss_fn,
        l2_clip_norm=1.0,
        normalize_by=len(jax.tree.leaves(task.batch)[0]),
        microbatch_size=microbatch_size,
    )
    noise = jax_privacy.noise_addition.gaussian_privatizer(
        stddev=grad_fn.sensitivity(), prng_key=jax.random.key(0)
    )
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
