"""What does a narrower dtype save in a training step, with privacy and without?

Whole steps are timed in turn under each policy of dpmp: those without privacy, as
people write them and as fast as they can be had (see `without_privacy.py`), and those
of `DPTrainer` with both engines. Quoted are the speed-up over the same step in float32,
and the share of its temporary memory that is saved, by the compiler's account.

Steps in float16 do not scale the loss, which takes no time to speak of. A device
without float8 multiplies in a wider dtype after rounding to float8: there, float8 shows
what training would learn and saves nothing.

    python -m benchmarks.precision
    python -m benchmarks.precision --task 'transformer, 3M' --rounds 3  # four minutes
    python -m benchmarks.precision --task tiny --out /tmp/tiny      # to try it out

Every line is appended to benchmarks/results/precision.jsonl.
"""

import argparse
import functools
import itertools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import dpmp
from benchmarks import models, results, steps, without_privacy
from benchmarks.steps import Step
from benchmarks.subjects import TASKS, TINY, Subject
from dpmp.tools import _timing

SUBJECTS = {
    "transformer, 3M": Subject(TASKS["transformer, 3M"].make, {16: 5}),
    "transformer, 17M": Subject(TASKS["transformer, 17M"].make, {16: 2}),
    "cnn": TASKS["cnn"],
    "tiny": TINY,
}
_BY_DEFAULT = ("transformer, 3M", "cnn")

# The dtype of a model's activations under each policy.
POLICIES = {
    "float32": jnp.float32,
    "mixed_bfloat16": jnp.bfloat16,
    "mixed_float16": jnp.float16,
    "float8": jnp.bfloat16,
}
_MICROBATCH_SIZE = 8


def _plain(task: models.Task, policy: str) -> Step:
    return steps.of_gradients(jax.grad(_loss_fn(task, policy)), task, policy)


def _without_privacy(task: models.Task, policy: str) -> Step:
    grad_fns = without_privacy.grad_fns(_loss_fn(task, policy))
    return steps.of_gradients(grad_fns["without privacy, 8"], task, policy)


def _loss_fn(task: models.Task, policy: str) -> Callable[..., jax.Array]:
    return dpmp.Policy.from_name(policy).in_product_precision(task.loss_fn)


def _of_dpmp(method: str, arithmetic: str) -> Callable[[models.Task, str], Step]:
    return functools.partial(
        steps.of_dpmp,
        method=method,
        arithmetic=arithmetic,
        microbatch_size=_MICROBATCH_SIZE,
    )


STEPS: dict[str, Callable[[models.Task, str], Step]] = {
    "plain": _plain,
    "without privacy, 8": _without_privacy,
    "dpmp book_keeping bounded, 8": _of_dpmp("book_keeping", "bounded"),
    "dpmp per_example exact, 8": _of_dpmp("per_example", "exact"),
}


def measure(subject: Subject, step: str, batch_size: int, rounds: int) -> Any:
    """The figures of a line, by policy."""
    prepare = {
        policy: functools.partial(STEPS[step], subject.make(dtype, batch_size), policy)
        for policy, dtype in POLICIES.items()
    }
    seconds, figures = steps.measure(prepare, rounds)
    return {**compare(seconds, figures["temp_megabytes"]), **figures}


def compare(
    seconds: dict[str, list[float]], megabytes: dict[str, float]
) -> dict[str, dict[str, float]]:
    """Medians, and what each policy saves over float32."""
    return {
        "milliseconds": steps.median_ms(seconds),
        "speed_up": {
            policy: round(_timing.median_ratio(seconds["float32"], x), 3)
            for policy, x in seconds.items()
        },
        "memory_saved": {
            policy: round(1 - x / megabytes["float32"], 3)
            for policy, x in megabytes.items()
        },
    }


def main() -> None:
    """Measures what was asked for and appends a line for each."""
    parser = argparse.ArgumentParser(description="Times steps in several precisions.")
    parser.add_argument("--task", choices=SUBJECTS, nargs="*", default=[*_BY_DEFAULT])
    parser.add_argument("--step", choices=STEPS, nargs="*", default=[*STEPS])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--out", type=pathlib.Path, default=results.RESULTS)
    args = parser.parse_args()
    for name, step in itertools.product(args.task, args.step):
        for batch_size, rounds in SUBJECTS[name].rounds.items():
            results.append_to(
                args.out,
                "precision",
                task=name,
                step=step,
                batch_size=batch_size,
                rounds=args.rounds or rounds,
                **measure(SUBJECTS[name], step, batch_size, args.rounds or rounds),
            )


if __name__ == "__main__":
    main()
