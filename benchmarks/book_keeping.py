"""What does book-keeping cost, next to training without privacy and to jax_privacy?

Timed are clipped sums of the gradients of transformers, with layers written out and in
a loop, of a CNN and of an LSTM. Quoted are ratios of time within rounds, of temporary
memory and of compile seconds, for `clipped_grad(method="book_keeping")` at once and in
microbatches, to

    plain                 `jax.grad` of the mean loss
    best without privacy  the fastest of: that; that with float32 results for bfloat16
                          products, which is what XLA's CPU compiler is fast at; these
                          in microbatches of 8; and book-keeping without norms, whose
                          gradients of weights are never rounded to bfloat16
    jax_privacy           its `clipped_grad` by default; in the microbatches in which it
                          is fastest; and the fastest that takes no more memory

    python -m benchmarks.book_keeping        # half an hour on two cores
    python -m benchmarks.book_keeping --task cnn lstm --rounds 3
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

import dpmp
from benchmarks import harness, models, steps


def contenders(task: models.Task, batch_size: int) -> dict[str, Callable[..., Any]]:
    """Functions of (params, batch), by name."""
    from jax_privacy import clipping

    made = {"plain": jax.grad(task.loss_fn), **steps.without_privacy(task.loss_fn)}
    theirs = functools.partial(clipping.clipped_grad, task.loss_fn, l2_clip_norm=1.0)
    clip = functools.partial(dpmp.clipped_grad, task.loss_fn, l2_clip_norm=1.0)
    ours = functools.partial(clip, method="book_keeping")
    floats = functools.partial(ours, arithmetic="unproved_float32")
    sizes = (None, *(n for n in (4, 8, 16) if n < batch_size))
    kinds: list[tuple[str, Callable[..., Any], tuple[int | None, ...]]] = [
        ("jax_privacy", theirs, (None, 1, 8)),
        ("dpmp", floats, sizes),
        ("dpmp bounded", ours, (4, 8)),
    ]
    for kind, make, some in kinds:
        for size in some:
            made[f"{kind}, {size or 'at once'}"] = make(microbatch_size=size)
    return made


def measure(task: models.Task, batch_size: int, rounds: int) -> dict[str, Any]:
    """Figures of all contenders that accept the task."""
    args = (task.params, task.batch)
    functions, refused = contenders(task, batch_size), {}
    for name in [name for name in functions if name.startswith("dpmp bounded")]:
        try:
            jax.eval_shape(functions[name], *args)
        except ValueError as error:
            refused[name] = str(error)
            del functions[name]
    return {**compare(harness.measure(functions, args, rounds)), "refused": refused}


def compare(measured: harness.Measured) -> dict[str, Any]:
    """Ratios of book-keeping to the others, and of all to the plain gradient."""
    best = {k: measured.fastest(k) for k in ("jax_privacy", "dpmp", "dpmp bounded")}
    best["without privacy"] = measured.fastest("plain", "without privacy")
    ours = [name for name in measured.seconds if name.startswith("dpmp")]
    return {
        "best": best,
        "time_ratio": {name: _ratios(name, measured, best) for name in ours},
        "memory_ratio": measured.memory_over("plain"),
        "compile_ratio": measured.compile_over("plain"),
        "milliseconds": measured.milliseconds(),
        "temp_megabytes": measured.megabytes(),
    }


def _ratios(
    name: str, measured: harness.Measured, best: dict[str, str | None]
) -> dict[str, float | None]:
    """Of the time of one contender to that of others."""
    seconds, memory = measured.seconds, measured.temp_bytes
    frugal = {k: x for k, x in seconds.items() if memory[k] <= memory[name]}
    references = {
        "plain": "plain",
        "best without privacy": best["without privacy"],
        "jax_privacy, at once": "jax_privacy, at once",
        "jax_privacy, best": best["jax_privacy"],
        "jax_privacy, in no more memory": harness.fastest(frugal, "jax_privacy"),
    }
    return {
        what: other and harness.ratio(seconds[name], seconds[other])
        for what, other in references.items()
    }


def benchmark(
    task: Sequence[str],
    dtype: Sequence[str],
    batch_size: int | None,
    rounds: int | None,
) -> Iterator[dict[str, Any]]:
    """A line for each model, dtype and batch size."""
    for name, kind in itertools.product(task, dtype):
        subject = models.SUBJECTS[name]
        for size in [batch_size] if batch_size else subject.rounds:
            num_rounds = rounds or subject.rounds.get(size, 3)
            made = subject.make(models.DTYPES[kind], size)
            yield {
                "question": "step",
                "task": name,
                "dtype": kind,
                "batch_size": size,
                "rounds": num_rounds,
                **measure(made, size, num_rounds),
            }


if __name__ == "__main__":
    harness.main(
        benchmark,
        tiny={"task": ["tiny"], "dtype": ["bfloat16"], "rounds": 1},
        task=harness.Some(models.SUBJECTS, models.TASKS),
        dtype=harness.Some(models.DTYPES),
        batch_size=int,
        rounds=int,
    )
