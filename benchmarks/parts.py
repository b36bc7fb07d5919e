"""Where does the time of a private step go: gradients, norms, sum, noise, optimizer?

Programs that do more and more of a step are timed in turn:

    forward    the loss alone
    plain      the gradient of the mean loss
    norms      the norms of the examples' gradients
    sum        norms, and the sum of the clipped gradients
    noise      the same with noise
    step       the same with Adam

and noise and Adam by themselves. A part is what one program takes more than the one
before it. The compiler drops what a program does not return, so that "norms" does not
compute a sum.

    python -m benchmarks.parts            # three minutes on two cores
"""

import itertools
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import harness, models
from dpmp import noise_addition

_BATCH_SIZE, _MICROBATCH_SIZE = 64, 8
ENGINES = {
    "book_keeping, bounded": {"method": "book_keeping", "arithmetic": "bounded"},
    "per_example, exact": {"method": "per_example", "arithmetic": "exact"},
}


def programs(
    task: models.Task, dtype: Any, engine: dict[str, Any]
) -> tuple[dict[str, Callable[..., Any]], tuple[Any, ...]]:
    """Functions of (params, opt_state, noise_state, batch), and these."""
    optimizer, key = optax.adam(1e-3), jax.random.key(0)
    privatizer = noise_addition.gaussian_privatizer(stddev=1.0, prng_key=key)
    options = {"microbatch_size": _MICROBATCH_SIZE, **engine}
    total_of, norms_of = (
        task.clipped_grad(return_grad_norms=has_norms, **options)
        for has_norms in (False, True)
    )
    masters = jax.tree.map(lambda x: x.astype(jnp.float32), task.params)

    def cast(params: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(dtype), params)

    def norms(params: Any, batch: Any) -> Any:
        return norms_of(cast(params), batch)[1].grad_norms

    def total(params: Any, batch: Any) -> Any:
        return total_of(cast(params), batch)

    def adam(params: Any, opt_state: Any, grads: Any) -> Any:
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    def step(params: Any, opt_state: Any, noise_state: Any, batch: Any) -> Any:
        grads, noise_state = privatizer.update(total(params, batch), noise_state)
        return *adam(params, opt_state, grads), noise_state

    # Noise alone is added to zeros of the type that this arithmetic returns.
    shapes = jax.eval_shape(total, masters, task.batch)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    args = (masters, optimizer.init(masters), privatizer.init(masters), task.batch)
    return {
        "forward": lambda p, o, n, batch: task.loss_fn(cast(p), batch),
        "plain": lambda p, o, n, batch: jax.grad(task.loss_fn)(cast(p), batch),
        "norms": lambda p, o, n, batch: norms(p, batch),
        "sum": lambda p, o, n, batch: total(p, batch),
        "noise": lambda p, o, n, batch: privatizer.update(total(p, batch), n),
        "step": step,
        "noise alone": lambda p, o, n, batch: privatizer.update(zeros, n),
        "Adam alone": lambda p, o, n, batch: adam(p, o, p),
    }, args


def summarize(measured: harness.Measured) -> dict[str, Any]:
    """Milliseconds of the programs, and the share of each part of a step."""
    ms = measured.milliseconds()
    pairs = itertools.pairwise(["norms", "sum", "noise", "step"])
    parts = {"norms": ms["norms"]} | {b: round(ms[b] - ms[a], 1) for a, b in pairs}
    return {
        "milliseconds": ms,
        "part_milliseconds": parts,
        "share": harness.rounded(parts, 3, unit=ms["step"]),
        "time_over_plain": measured.time_over("plain"),
    }


def benchmark(
    task: Annotated[str, harness.Each(models.SUBJECTS, ["transformer, 3M", "cnn"])],
    dtype: Annotated[str, harness.Each(models.DTYPES, ["bfloat16"])],
    engine: Annotated[str, harness.Each(ENGINES)],
    rounds: int = 5,
) -> harness.Lines:
    """A line for each model, dtype and engine."""
    made = models.SUBJECTS[task].make(models.DTYPES[dtype], _BATCH_SIZE)
    functions, args = programs(made, models.DTYPES[dtype], ENGINES[engine])
    sizes = {"batch_size": _BATCH_SIZE, "microbatch_size": _MICROBATCH_SIZE}
    yield {**sizes, **summarize(harness.measure(functions, args, rounds))}


if __name__ == "__main__":
    harness.main(benchmark, tiny={"task": ["tiny"], "rounds": 1})
