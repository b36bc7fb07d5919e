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
from collections.abc import Callable
from typing import Annotated

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


def _of_gradients(name: str) -> Callable[[models.Task, str], Step]:
    def prepare(task: models.Task, policy: str) -> Step:
        loss_fn = dpmp.Policy.from_name(policy).in_product_precision(task.loss_fn)
        grad_fns = {"plain": jax.grad(loss_fn), **steps.without_privacy(loss_fn)}
        return steps.of_gradients(grad_fns[name], task, policy)

    return prepare


def _of_dpmp(method: str, arithmetic: str) -> Callable[[models.Task, str], Step]:
    return functools.partial(
        steps.of_dpmp, method=method, arithmetic=arithmetic, microbatch_size=8
    )


STEPS: dict[str, Callable[[models.Task, str], Step]] = {
    "plain": _of_gradients("plain"),
    "without privacy, 8": _of_gradients("without privacy, 8"),
    "dpmp book_keeping bounded, 8": _of_dpmp("book_keeping", "bounded"),
    "dpmp per_example exact, 8": _of_dpmp("per_example", "exact"),
}


def compare(measured: harness.Measured) -> dict[str, dict[str, float]]:
    """Medians, and what each policy saves over float32."""
    memory = measured.memory_over("float32")
    return {
        "milliseconds": measured.milliseconds(),
        "speed_up": {k: measured.ratio("float32", k) for k in measured.seconds},
        "memory_saved": {k: round(1 - x, 3) for k, x in memory.items()},
    }


def benchmark(
    task: Annotated[str, harness.Each(models.SUBJECTS, ["transformer, 3M", "cnn"])],
    step: Annotated[str, harness.Each(STEPS)],
    rounds: int | None = None,
) -> harness.Lines:
    """A line for each model and step."""
    subject = models.SUBJECTS[task]
    size, num_rounds = next(iter(subject.sizes(None, rounds).items()))
    prepare = {
        policy: functools.partial(STEPS[step], subject.make(dtype, size), policy)
        for policy, dtype in POLICIES.items()
    }
    measured, figures = steps.measure(prepare, num_rounds)
    sizes = {"batch_size": size, "rounds": num_rounds}
    yield {**sizes, **compare(measured), **figures}


if __name__ == "__main__":
    harness.main(benchmark, tiny={"task": ["tiny"], "rounds": 1})
