"""What does a narrower dtype save in a training step, with privacy and without?

Whole steps are timed in turn under each policy of dpmp: those without privacy, as
people write them and as fast as they can be had (see `steps.py`), and those of
`DPTrainer` with both engines. Quoted are the speed-up over the same step in float32,
and the share of its temporary memory that is saved, by the compiler's account.

Steps in float16 do not scale the loss, which takes no time to speak of. A device
without float8 multiplies in a wider dtype after rounding to float8: there, float8 shows
what training would learn and saves nothing.

    python -m benchmarks.precision
    python -m benchmarks.precision --task 'transformer, 3M' --rounds 3  # four minutes
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import dpmp
from benchmarks import harness, models, steps
from benchmarks.steps import Step

# The dtype of a model's activations under each policy.
POLICIES = {
    "float32": jnp.float32,
    "mixed_bfloat16": jnp.bfloat16,
    "mixed_float16": jnp.float16,
    "float8": jnp.bfloat16,
}


def _plain(task: models.Task, policy: str) -> Step:
    return steps.of_gradients(jax.grad(_loss_fn(task, policy)), task, policy)


def _without_privacy(task: models.Task, policy: str) -> Step:
    grad_fns = steps.without_privacy(_loss_fn(task, policy))
    return steps.of_gradients(grad_fns["without privacy, 8"], task, policy)


def _loss_fn(task: models.Task, policy: str) -> Callable[..., jax.Array]:
    return dpmp.Policy.from_name(policy).in_product_precision(task.loss_fn)


def _of_dpmp(method: str, arithmetic: str) -> Callable[[models.Task, str], Step]:
    return functools.partial(
        steps.of_dpmp, method=method, arithmetic=arithmetic, microbatch_size=8
    )


STEPS: dict[str, Callable[[models.Task, str], Step]] = {
    "plain": _plain,
    "without privacy, 8": _without_privacy,
    "dpmp book_keeping bounded, 8": _of_dpmp("book_keeping", "bounded"),
    "dpmp per_example exact, 8": _of_dpmp("per_example", "exact"),
}


def compare(measured: harness.Measured) -> dict[str, dict[str, float]]:
    """Medians, and what each policy saves over float32."""
    seconds, memory = measured.seconds, measured.memory_over("float32")
    return {
        "milliseconds": measured.milliseconds(2),
        "speed_up": {
            k: harness.ratio(seconds["float32"], x) for k, x in seconds.items()
        },
        "memory_saved": {k: round(1 - x, 3) for k, x in memory.items()},
    }


def benchmark(
    task: Sequence[str], step: Sequence[str], rounds: int | None
) -> Iterator[dict[str, Any]]:
    """A line for each model and step."""
    for name, kind in itertools.product(task, step):
        subject = models.SUBJECTS[name]
        batch_size, own_rounds = next(iter(subject.rounds.items()))
        prepare = {
            policy: functools.partial(
                STEPS[kind], subject.make(dtype, batch_size), policy
            )
            for policy, dtype in POLICIES.items()
        }
        measured, figures = steps.measure(prepare, rounds or own_rounds)
        yield {
            "task": name,
            "step": kind,
            "batch_size": batch_size,
            "rounds": rounds or own_rounds,
            **compare(measured),
            **figures,
        }


if __name__ == "__main__":
    harness.main(
        benchmark,
        tiny={"task": ["tiny"], "rounds": 1},
        task=harness.Some(models.SUBJECTS, ["transformer, 3M", "cnn"]),
        step=harness.Some(STEPS),
        rounds=int,
    )
