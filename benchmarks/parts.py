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
    python -m benchmarks.parts --task tiny --out /tmp/tiny --rounds 2

Every line is appended to benchmarks/results/parts.jsonl.
"""

import argparse
import functools
import itertools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import dpmp
from benchmarks import models, results, timing
from benchmarks.subjects import DTYPES, TASKS, TINY
from dpmp import noise_addition

SUBJECTS: dict[str, Callable[..., models.Task]] = {
    "transformer, 3M": TASKS["transformer, 3M"].make,
    "cnn": models.cnn,
    "tiny": TINY.make,
}
_BATCH_SIZE = 64
ENGINES = {
    "book_keeping, bounded": {"method": "book_keeping", "arithmetic": "bounded"},
    "per_example, exact": {"method": "per_example", "arithmetic": "exact"},
}
_MICROBATCH_SIZE = 8


def programs(
    task: models.Task, dtype: Any, engine: dict[str, Any]
) -> tuple[dict[str, Callable[..., Any]], tuple[Any, ...]]:
    """Functions of (params, opt_state, noise_state, batch), and these."""
    optimizer, key = optax.adam(1e-3), jax.random.key(0)
    privatizer = noise_addition.gaussian_privatizer(stddev=1.0, prng_key=key)
    clip = functools.partial(dpmp.clipped_grad, task.loss_fn, l2_clip_norm=1.0)
    clip = functools.partial(clip, microbatch_size=_MICROBATCH_SIZE, **engine)
    masters = jax.tree.map(lambda x: x.astype(jnp.float32), task.params)

    def cast(params: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(dtype), params)

    def norms(params: Any, opt_state: Any, noise_state: Any, batch: Any) -> Any:
        return clip(return_grad_norms=True)(cast(params), batch)[1].grad_norms

    def total(params: Any, opt_state: Any, noise_state: Any, batch: Any) -> Any:
        return clip()(cast(params), batch)

    def noise(params: Any, opt_state: Any, noise_state: Any, batch: Any) -> Any:
        return privatizer.update(total(params, None, None, batch), noise_state)

    def step(params: Any, opt_state: Any, noise_state: Any, batch: Any) -> Any:
        grads, noise_state = noise(params, None, noise_state, batch)
        return *adam(params, opt_state, grads), noise_state

    def adam(params: Any, opt_state: Any, grads: Any) -> Any:
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    args = (masters, optimizer.init(masters), privatizer.init(masters), task.batch)
    # Noise alone is added to zeros of the type that this arithmetic returns.
    shapes = jax.eval_shape(total, *args)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return {
        "forward": lambda p, o, n, batch: task.loss_fn(cast(p), batch),
        "plain": lambda p, o, n, batch: jax.grad(task.loss_fn)(cast(p), batch),
        "norms": norms,
        "sum": total,
        "noise": noise,
        "step": step,
        "noise alone": lambda p, o, n, b: privatizer.update(zeros, n),
        "Adam alone": lambda p, o, n, b: adam(p, o, p),
    }, args


def summarize(measured: dict[str, timing.Measured]) -> dict[str, Any]:
    """Milliseconds of the programs, and the share of each part of a step."""
    ms = {name: timing.median_ms(m) for name, m in measured.items()}
    order = ["norms", "sum", "noise", "step"]
    pairs = itertools.pairwise(order)
    parts = {"norms": ms["norms"]} | {b: round(ms[b] - ms[a], 1) for a, b in pairs}
    return {
        "milliseconds": ms,
        "part_milliseconds": parts,
        "share": {name: round(x / ms["step"], 3) for name, x in parts.items()},
        "time_over_plain": {
            name: timing.time_ratio(m, measured["plain"])
            for name, m in measured.items()
        },
    }


def main() -> None:
    """Measures what was asked for and appends a line for each."""
    parser = argparse.ArgumentParser(description="Times the parts of a step.")
    parser.add_argument(
        "--task", choices=SUBJECTS, nargs="*", default=["transformer, 3M", "cnn"]
    )
    parser.add_argument("--dtype", choices=DTYPES, nargs="*", default=["bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, default=results.RESULTS)
    args = parser.parse_args()
    for name, dtype, engine in itertools.product(args.task, args.dtype, ENGINES):
        task = SUBJECTS[name](DTYPES[dtype], _BATCH_SIZE)
        functions, arguments = programs(task, DTYPES[dtype], ENGINES[engine])
        results.append_to(
            args.out,
            "parts",
            task=name,
            dtype=dtype,
            batch_size=_BATCH_SIZE,
            microbatch_size=_MICROBATCH_SIZE,
            engine=engine,
            rounds=args.rounds,
            **summarize(timing.measure(functions, arguments, args.rounds)),
        )


if __name__ == "__main__":
    main()
