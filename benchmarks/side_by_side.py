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

    python -m benchmarks.side_by_side                 # twenty minutes on two cores
    python -m benchmarks.side_by_side --task 'transformer, 17M' --rounds 2
    python -m benchmarks.side_by_side --task 'SmolLM2, 135M' --only "$PATTERN"
    python -m benchmarks.side_by_side --task tiny --out /tmp/tiny      # to try it out

All steps of SmolLM2 together need more memory than most machines have. The pattern
'^plain|without privacy$|bounded, 4|exact|privacy, (at once|1)$' leaves a few.

`pip install '.[peers]'` installs the other libraries. Every line is appended to
benchmarks/results/side_by_side.jsonl.
"""

import argparse
import functools
import importlib.util
import itertools
import pathlib
import re
import statistics
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks import models, opacus_steps, results, steps, without_privacy
from benchmarks.steps import Step
from benchmarks.subjects import DTYPES, TASKS, TINY, Subject
from dpmp.tools import _timing

SUBJECTS = {
    "transformer, 3M": Subject(TASKS["transformer, 3M"].make, {16: 5, 64: 3}),
    "cnn": TASKS["cnn"],
    "lstm": TASKS["lstm"],
    "transformer, 17M": Subject(TASKS["transformer, 17M"].make, {16: 2}),
    "SmolLM2, 135M": Subject(models.smollm2, {8: 2}),
    "tiny": TINY,
}
_BY_DEFAULT = ("transformer, 3M", "cnn", "lstm")

# Microbatch sizes for each engine and arithmetic; None is the whole batch.
_DPMP: dict[tuple[str, str], tuple[int | None, ...]] = {
    ("book_keeping", "bounded"): (4, 8, 16),
    ("book_keeping", "unproved_float32"): (None, 8),
    ("per_example", "exact"): (1, 8),
    ("per_example", "float32"): (8,),
}
_JAX_PRIVACY = (None, 1, 8, 16)
_POLICIES = {"bfloat16": "mixed_bfloat16", "float32": "float32"}


def contenders(
    subject: Subject, dtype: str, batch_size: int
) -> dict[str, Callable[[], Step]]:
    """What prepares the steps, by name."""
    task = subject.make(DTYPES[dtype], batch_size)
    policy = _POLICIES[dtype]
    made: dict[str, Callable[[], Step]] = {}
    plain = {"plain": jax.grad(task.loss_fn), **without_privacy.grad_fns(task.loss_fn)}
    for name, grad_fn in plain.items():
        made[name] = functools.partial(steps.of_gradients, grad_fn, task, policy)
    for (method, arithmetic), sizes in _DPMP.items():
        for size in sizes:
            made[f"dpmp {method} {arithmetic}, {size or 'at once'}"] = (
                functools.partial(steps.of_dpmp, task, policy, method, arithmetic, size)
            )
    if importlib.util.find_spec("jax_privacy"):
        for size in _JAX_PRIVACY:
            made[f"jax_privacy, {size or 'at once'}"] = functools.partial(
                steps.of_jax_privacy, task, policy, size
            )
    if _has_twin(subject) and not opacus_steps.missing():
        in_torch = opacus_steps.steps(
            steps.masters(task),
            np.asarray(task.batch["tokens"]),
            heads=getattr(subject.make, "keywords", {})["heads"],
            in_bfloat16=dtype == "bfloat16",
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


def measure(
    subject: Subject, dtype: str, batch_size: int, rounds: int, only: str = ""
) -> Any:
    """The figures of a line, for steps whose names have the pattern `only`."""
    prepare = {
        name: make
        for name, make in contenders(subject, dtype, batch_size).items()
        if re.search(only, name)
    }
    seconds, figures = steps.measure(prepare, rounds)
    return {**compare(seconds), **figures, "absent": absent(subject)}


def compare(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, ranges, and ratios to the contenders that a reader compares with."""
    best = {
        "fastest plain": _fastest(seconds, "plain", "without privacy"),
        "jax_privacy, best": _fastest(seconds, "jax_privacy"),
    }
    same = ("plain", "torch, plain", "jax_privacy, at once")
    references = {**{name: name for name in same}, **best}
    return {
        "milliseconds": steps.median_ms(seconds),
        "range": {
            k: [steps.milliseconds(min(x)), steps.milliseconds(max(x))]
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
    parser.add_argument("--only", default="", help="a pattern of the steps to measure")
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
                **measure(subject, dtype, batch_size, rounds, args.only),
            )


if __name__ == "__main__":
    main()
