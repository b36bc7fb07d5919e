"""What does a whole training step take, next to what a user would pick instead?

A step has the gradients, clipping, noise and Adam, for float32 parameters and a loss in
float32 or bfloat16. These ones take the same step of the same model on the same batch:

    plain              `jax.grad` of the mean loss, as people write it
    without privacy    the same, as fast as it can be had: see `steps.py`
    dpmp               `DPTrainer` with each engine and arithmetic, in microbatches
    jax_privacy        its `clipped_grad` by default and in microbatches, and its noise
    torch, plain       the same model in PyTorch
    Opacus             with hooks, and with ghost clipping

All are timed in turn, in one process. Quoted are medians and ranges of milliseconds,
ratios within rounds, temporary memory by the compiler's account, by how much the
process grows in a step beside its parameters, and seconds to compile. A library that is
not installed is named in the line, and so is what a library refuses.

    python -m benchmarks.side_by_side                 # twenty minutes on two cores
    python -m benchmarks.side_by_side --task 'transformer, 17M' --batch-size 16
    python -m benchmarks.side_by_side --task 'SmolLM2, 135M' --only "$PATTERN"

All steps of SmolLM2 together need more memory than most machines have. The pattern
'^plain|without privacy$|bounded, 4|exact|privacy, (at once|1)$' leaves a few.
`pip install '.[peers]'` installs the other libraries.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import numpy as np

from benchmarks import harness, models, steps
from benchmarks.steps import Step

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
    subject: models.Subject, dtype: str, batch_size: int
) -> dict[str, Callable[[], Step]]:
    """What prepares the steps, by name."""
    task = subject.make(models.DTYPES[dtype], batch_size)
    policy = _POLICIES[dtype]
    plain = {"plain": jax.grad(task.loss_fn), **steps.without_privacy(task.loss_fn)}
    made: dict[str, Callable[[], Step]] = {
        name: functools.partial(steps.of_gradients, grad_fn, task, policy)
        for name, grad_fn in plain.items()
    }
    for kind, sizes in _DPMP.items():
        make = functools.partial(steps.of_dpmp, task, policy, *kind)
        made |= _in_sizes(f"dpmp {' '.join(kind)}", make, sizes)
    left_out = absent(subject)
    if "jax_privacy" not in left_out:
        make = functools.partial(steps.of_jax_privacy, task, policy)
        made |= _in_sizes("jax_privacy", make, _JAX_PRIVACY)
    if "torch, Opacus" not in left_out:
        from benchmarks import in_pytorch

        in_torch = in_pytorch.steps(
            steps.masters(task),
            np.asarray(task.batch["tokens"]),
            heads=getattr(subject.make, "keywords", {})["heads"],
            in_bfloat16=dtype == "bfloat16",
        )
        made |= {k: lambda make=x: Step(make()) for k, x in in_torch.items()}
    return made


def _in_sizes(
    kind: str, make: Callable[..., Step], sizes: Sequence[int | None]
) -> dict[str, Callable[[], Step]]:
    """One kind of contender in several microbatch sizes, by name."""
    return {
        f"{kind}, {size or 'at once'}": functools.partial(make, microbatch_size=size)
        for size in sizes
    }


def absent(subject: models.Subject) -> dict[str, str]:
    """The contenders that there are none of, with the reason."""
    reasons = {}
    if not harness.is_installed("jax_privacy"):
        reasons["jax_privacy"] = "not installed; pip install jax-privacy"
    options = getattr(subject.make, "keywords", {})
    if "heads" not in options:
        reasons["torch, Opacus"] = "this model is not written in PyTorch"
    elif packages := missing():
        reasons["torch, Opacus"] = f"not installed; pip install {' '.join(packages)}"
    return reasons


def missing() -> list[str]:
    """The packages of the steps in PyTorch that are not installed."""
    return [name for name in ("torch", "opacus") if not harness.is_installed(name)]


def compare(measured: harness.Measured) -> dict[str, Any]:
    """Medians, ranges, and ratios to the contenders that a reader compares with."""
    best = {
        "fastest plain": measured.fastest("plain", "without privacy"),
        "jax_privacy, best": measured.fastest("jax_privacy"),
    }
    same = ("plain", "torch, plain", "jax_privacy, at once")
    references = {**{name: name for name in same}, **best}
    return {
        "milliseconds": measured.milliseconds(),
        "range": {
            name: [round(1e3 * end, 2) for end in (min(x), max(x))]
            for name, x in measured.seconds.items()
        },
        "best": best,
        "time_over": {
            what: measured.time_over(reference)
            for what, reference in references.items()
            if reference in measured.seconds
        },
    }


def benchmark(
    task: Annotated[
        str, harness.Each(models.SUBJECTS, ["transformer, 3M", "cnn", "lstm"])
    ],
    dtype: Annotated[str, harness.Each(models.DTYPES)],
    batch_size: int | None = None,
    rounds: int | None = None,
    only: str = "",
) -> harness.Lines:
    """A line for each model, dtype and batch size."""
    subject = models.SUBJECTS[task]
    for size, num_rounds in subject.sizes(batch_size, rounds).items():
        made = contenders(subject, dtype, size)
        chosen = {k: make for k, make in made.items() if re.search(only, k)}
        measured, figures = steps.measure(chosen, num_rounds)
        sizes = {"batch_size": size, "rounds": num_rounds}
        yield {**sizes, **compare(measured), **figures, "absent": absent(subject)}


if __name__ == "__main__":
    tiny = {"task": ["tiny"], "dtype": ["bfloat16"], "rounds": 1}
    # Compilation is timed, so programs must not come from the disk.
    jax.config.update("jax_enable_compilation_cache", False)
    harness.main(benchmark, tiny=tiny)
