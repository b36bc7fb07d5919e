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
from collections.abc import Callable
from typing import Annotated, Any

import jax

from benchmarks import harness, models, steps


def contenders(task: models.Task, batch_size: int) -> dict[str, Callable[..., Any]]:
    """Functions of (params, batch), by name."""
    ours = functools.partial(task.clipped_grad, method="book_keeping")
    floats = functools.partial(ours, arithmetic="unproved_float32")
    sizes = (None, *(n for n in (4, 8, 16) if n < batch_size))
    made = {
        **steps.in_sizes("jax_privacy", task.theirs, (None, 1, 8)),
        **steps.in_sizes("dpmp", floats, sizes),
        **steps.in_sizes("dpmp bounded", ours, (4, 8)),
    }
    return {
        "plain": jax.grad(task.loss_fn),
        **steps.without_privacy(task.loss_fn),
        **{name: make() for name, make in made.items()},
    }


def compare(measured: harness.Measured) -> dict[str, Any]:
    """Ratios of book-keeping to the others, and of all to the plain gradient."""
    best = {k: measured.fastest(k) for k in ("jax_privacy", "dpmp", "dpmp bounded")}
    best["without privacy"] = measured.fastest("plain", "without privacy")
    seconds, memory, ratios = measured.seconds, measured.temp_bytes, {}
    for name in [name for name in seconds if name.startswith("dpmp")]:
        frugal = {k: x for k, x in seconds.items() if memory[k] <= memory[name]}
        references = {
            "plain": "plain",
            "best without privacy": best["without privacy"],
            "jax_privacy, at once": "jax_privacy, at once",
            "jax_privacy, best": best["jax_privacy"],
            "jax_privacy, in no more memory": harness.Measured(frugal).fastest(
                "jax_privacy"
            ),
        }
        ratios[name] = {k: x and measured.ratio(name, x) for k, x in references.items()}
    return {"best": best, **measured.figures("plain"), "time_ratio": ratios}


def benchmark(
    task: Annotated[str, harness.Each(models.SUBJECTS, models.TASKS)],
    dtype: Annotated[str, harness.Each(models.DTYPES)],
    batch_size: int | None = None,
    rounds: int | None = None,
) -> harness.Lines:
    """A line for each model, dtype and batch size."""
    subject = models.SUBJECTS[task]
    for size, num_rounds in subject.sizes(batch_size, rounds).items():
        made = subject.make(models.DTYPES[dtype], size)
        measured = harness.measure(contenders(made, size), made.args, num_rounds)
        sizes = {"batch_size": size, "rounds": num_rounds}
        yield {"question": "step", **sizes, **compare(measured)}


if __name__ == "__main__":
    tiny = {"task": ["tiny"], "dtype": ["bfloat16"], "rounds": 1}
    harness.main(benchmark, tiny=tiny)
