"""What does a whole training step take, next to what a user would pick instead?

A step has the gradients, clipping, noise and Adam, for float32 parameters and a loss in
float32 or bfloat16. These ones take the same step of the same model on the same batch:

    plain              `jax.grad` of the mean loss, as people write it
    without privacy    the same, as fast as it can be had: see `without_privacy.py`
    dpmp               `DPTrainer` with each engine and arithmetic, in microbatches
    jax_privacy        its `clipped_grad` by default and in microbatches, and its noise
    torch, plain       the same model in PyTorch
    Opacus             with hooks, and with ghost clipping

All are timed in turn, in one process. Quoted are medians and ranges of milliseconds,
ratios within rounds, temporary memory by the compiler's account, by how much the
process grows in a step beside its parameters, and seconds to compile. A library that is
not installed is named in the line, and so is what a library refuses.

    python -m benchmarks.side_by_side                 # thirteen minutes on two cores
    python -m benchmarks.side_by_side --task 'transformer, 17M' --rounds 2
    python -m benchmarks.side_by_side --task tiny --out /tmp/tiny      # to try it out

`pip install '.[peers]'` installs the other libraries. Every line is appended to
benchmarks/results/side_by_side.jsonl.
"""

import argparse
import functools
import importlib.util
import itertools
import pathlib
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpmp
from benchmarks import models, opacus_steps, resident, results, without_privacy
from benchmarks.subjects import DTYPES, TASKS, TINY, Subject
from dpmp.tools import _timing

SUBJECTS = {
    "transformer, 3M": Subject(TASKS["transformer, 3M"].make, {16: 5, 64: 3}),
    "cnn": TASKS["cnn"],
    "lstm": TASKS["lstm"],
    "transformer, 17M": Subject(TASKS["transformer, 17M"].make, {16: 2}),
    "tiny": TINY,
}
_BY_DEFAULT = ("transformer, 3M", "cnn", "lstm")

# Microbatch sizes for each engine and arithmetic; None is the whole batch.
_DPMP: dict[tuple[str, str], tuple[int | None, ...]] = {
    ("book_keeping", "bounded"): (4, 8),
    ("book_keeping", "unproved_float32"): (None, 8),
    ("per_example", "exact"): (8,),
    ("per_example", "float32"): (8,),
    ("per_example", "float32x2"): (8,),
}
_JAX_PRIVACY = (None, 1, 8, 16)
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


def contenders(
    subject: Subject, dtype: str, batch_size: int
) -> dict[str, Callable[[], Step]]:
    """What prepares the steps, by name."""
    task = subject.make(DTYPES[dtype], batch_size)
    params = jax.tree.map(lambda x: np.asarray(x, np.float32), task.params)
    made: dict[str, Callable[[], Step]] = {}
    plain = {"plain": jax.grad(task.loss_fn), **without_privacy.grad_fns(task.loss_fn)}
    for name, grad_fn in plain.items():
        made[name] = functools.partial(_prepare_plain, grad_fn, params, task, dtype)
    for (method, arithmetic), sizes in _DPMP.items():
        for size in sizes:
            name = f"dpmp {method} {arithmetic}, {size or 'at once'}"
            made[name] = functools.partial(
                _prepare_dpmp, task, params, dtype, method, arithmetic, size
            )
    if importlib.util.find_spec("jax_privacy"):
        for size in _JAX_PRIVACY:
            name = f"jax_privacy, {size or 'at once'}"
            made[name] = functools.partial(
                _prepare_jax_privacy, task, params, dtype, size
            )
    if _has_twin(subject) and not opacus_steps.missing():
        heads = getattr(subject.make, "keywords", {})["heads"]
        tokens = np.asarray(task.batch["tokens"])
        in_torch = opacus_steps.steps(
            params, tokens, heads=heads, in_bfloat16=dtype == "bfloat16"
        )
        for name, make in in_torch.items():
            made[name] = lambda make=make: Step(make())
    return made


def absent(subject: Subject) -> dict[str, str]:
    """The contenders that there are none of, with the reason."""
    reasons = {}
    if not importlib.util.find_spec("jax_privacy"):
        reasons["jax_privacy"] = "not installed; pip install jax-privacy"
    if not _has_twin(subject):
        reasons["torch, Opacus"] = "this model is not written in PyTorch"
    elif missing := opacus_steps.missing():
        reasons["torch, Opacus"] = f"not installed; pip install {' '.join(missing)}"
    return reasons


def _has_twin(subject: Subject) -> bool:
    options = getattr(subject.make, "keywords", {})
    return "heads" in options and not options.get("scan")


def _prepare_plain(
    grad_fn: Callable[..., Any], params: Any, task: models.Task, dtype: str
) -> Step:
    return _of_gradients(grad_fn, params, task.batch, dtype, optax.identity())


def _prepare_jax_privacy(
    task: models.Task, params: Any, dtype: str, microbatch_size: int | None
) -> Step:
    import jax_privacy.clipping
    import jax_privacy.noise_addition

    batch_size = len(jax.tree.leaves(task.batch)[0])
    grad_fn = jax_privacy.clipping.clipped_grad(
        task.loss_fn,
        l2_clip_norm=1.0,
        normalize_by=batch_size,
        microbatch_size=microbatch_size,
    )
    noise = jax_privacy.noise_addition.gaussian_privatizer(
        stddev=grad_fn.sensitivity(), prng_key=jax.random.key(0)
    )
    return _of_gradients(grad_fn, params, task.batch, dtype, noise)


def _of_gradients(
    grad_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    dtype: str,
    noise: optax.GradientTransformation,
) -> Step:
    """The step as people write it around a function for gradients."""
    optimizer = optax.chain(noise, optax.adam(1e-3))

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        compute_params = jax.tree.map(lambda x: x.astype(DTYPES[dtype]), params)
        grads = grad_fn(compute_params, batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        updates = jax.tree.map(lambda x: x.astype(jnp.float32), updates)
        return optax.apply_updates(params, updates), opt_state

    params = jax.tree.map(jnp.asarray, params)
    # The state of the optimizer is float32 where gradients are narrower, too.
    state = params, optimizer.init(params)
    return _compiled(jax.jit(step, donate_argnums=0), state, batch)


def _prepare_dpmp(
    task: models.Task,
    params: Any,
    dtype: str,
    method: str,
    arithmetic: str,
    microbatch_size: int | None,
) -> Step:
    batch_size = len(jax.tree.leaves(task.batch)[0])
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
        policy="mixed_bfloat16" if dtype == "bfloat16" else "float32",
    )
    state = trainer.init(params, prng_key=jax.random.key(0))
    batch = jax.tree.map(jnp.asarray, task.batch)
    program, constants = trainer._step.make_program(state, batch)
    is_padding = jnp.zeros(batch_size, bool)
    return _compiled(
        program, state, batch, is_padding, constants, next_state=lambda out: out[0]
    )


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


def measure(subject: Subject, dtype: str, batch_size: int, rounds: int) -> Any:
    """The figures of a line."""
    steps, refused = {}, {}
    for name, prepare in contenders(subject, dtype, batch_size).items():
        try:
            with warnings.catch_warnings(action="ignore"):
                steps[name] = prepare()
                jax.block_until_ready(steps[name].run())
        except Exception as error:  # whatever a library raises, the others go on
            refused[name] = f"{type(error).__name__}: {str(error).strip()[:300]}"
            steps.pop(name, None)
    growth = {
        name: resident.growth_in_bytes(lambda s=step: jax.block_until_ready(s.run()))
        for name, step in steps.items()
    }
    # The threads of PyTorch spin for a while after their last step of a round.
    calls = {"rest": lambda: time.sleep(0.1)} | {k: x.run for k, x in steps.items()}
    seconds = _timing.in_turn(calls, rounds)
    del seconds["rest"]
    return {
        **compare(seconds),
        "temp_megabytes": {
            k: round(x.temp_bytes / 1e6, 1)
            for k, x in steps.items()
            if x.temp_bytes is not None
        },
        "growth_megabytes": {
            k: round(x / 1e6, 1) for k, x in growth.items() if x is not None
        },
        "compile_seconds": {
            k: round(x.compile_seconds, 1)
            for k, x in steps.items()
            if x.compile_seconds is not None
        },
        "refused": refused,
        "absent": absent(subject),
    }


def compare(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, ranges, and ratios to the contenders that a reader compares with."""
    best = {
        "fastest plain": _fastest(seconds, "plain", "without privacy"),
        "jax_privacy, best": _fastest(seconds, "jax_privacy"),
    }
    same = ("plain", "torch, plain", "jax_privacy, at once")
    references = {**{name: name for name in same}, **best}
    return {
        "milliseconds": {
            k: _milliseconds(statistics.median(x)) for k, x in seconds.items()
        },
        "range": {
            k: [_milliseconds(min(x)), _milliseconds(max(x))]
            for k, x in seconds.items()
        },
        "best": best,
        "time_over": {
            what: {
                k: round(_timing.median_ratio(x, seconds[reference]), 3)
                for k, x in seconds.items()
            }
            for what, reference in references.items()
            if reference in seconds
        },
    }


def _milliseconds(seconds: float) -> float:
    return round(1e3 * seconds, 2)


def _fastest(seconds: dict[str, list[float]], *kinds: str) -> str | None:
    some = {k: x for k, x in seconds.items() if k.split(",")[0] in kinds}
    return min(some, key=lambda k: statistics.median(some[k])) if some else None


def main() -> None:
    """Measures what was asked for and appends a line for each."""
    parser = argparse.ArgumentParser(description="Times whole training steps.")
    parser.add_argument("--task", choices=SUBJECTS, nargs="*", default=[*_BY_DEFAULT])
    parser.add_argument("--dtype", choices=DTYPES, nargs="*", default=[*DTYPES])
    parser.add_argument("--batch-size", type=int, nargs="*", help="multiples of 16")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--out", type=pathlib.Path, default=results.RESULTS)
    args = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)  # compilation is timed
    for name, dtype in itertools.product(args.task, args.dtype):
        subject = SUBJECTS[name]
        for batch_size in args.batch_size or subject.rounds:
            rounds = args.rounds or subject.rounds.get(batch_size, 3)
            results.append_to(
                args.out,
                "side_by_side",
                task=name,
                dtype=dtype,
                batch_size=batch_size,
                rounds=rounds,
                **measure(subject, dtype, batch_size, rounds),
            )


if __name__ == "__main__":
    main()
