"""How long do programs of many arrays take to compile, next to jax_privacy's?

Models are as people write them, with 150 to 1,100 arrays. Counted and timed are, for
the sum of clipped gradients of a batch,

- lines: those of StableHLO beyond the plain gradient's, for each array of parameters;
- seconds: from the call of `jax.jit(...).lower` to the compiled program (medians over
  rounds in which every contender is compiled anew, one after the other), and ratios to
  jax_privacy with `dtype=float32`;

and the same for `gaussian_privatizer` on 300 arrays.

    python -m benchmarks.compile_time        # ten minutes on two cores

Every line is appended to benchmarks/results/compile_time.jsonl.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import dpmp
from benchmarks import flax_models, models, peers, results
from dpmp import noise_addition

ARITHMETICS = ("float32", "exact")


def square_layers(batch_size: int = 32) -> models.Task:
    """Forty layers of one shape."""
    params = [jnp.full((128, 128), 0.01) for _ in range(40)]

    def loss_fn(params, batch):
        x = functools.reduce(lambda x, w: jnp.tanh(x @ w), params, batch)
        return jnp.mean(jnp.square(x))

    return models.Task(loss_fn, params, jnp.ones((batch_size, 128)))


def scalars(batch_size: int = 32) -> models.Task:
    """1,100 arrays of a single number."""
    params = [jnp.full((), 0.5) for _ in range(1_100)]

    def loss_fn(params, batch):
        return jnp.mean((jnp.stack(params) @ batch.T) ** 2)

    return models.Task(loss_fn, params, jnp.ones((batch_size, 1_100)))


TASKS: dict[str, Callable[[], models.Task]] = {
    "40 layers of 128 x 128": square_layers,
    "the same, batch of 512": lambda: square_layers(512),
    "transformer, 12 layers": lambda: flax_models.transformer(jnp.float32),
    "transformer, bfloat16": lambda: flax_models.transformer(jnp.bfloat16),
    "u-net": lambda: flax_models.unet(jnp.float32),
    "1,100 scalars": scalars,
}


def contenders(task: models.Task) -> dict[str, Callable[..., Any]]:
    """Functions of (params, batch), by name."""
    clip = functools.partial(dpmp.clipped_grad, task.loss_fn, l2_clip_norm=1.0)
    batch_size = len(jax.tree.leaves(task.batch)[0])
    kept = functools.partial(
        clip, method="book_keeping", microbatch_size=min(batch_size, 32)
    )
    return {
        "plain": jax.grad(task.loss_fn),
        "jax_privacy": peers.jax_privacy_clipped_grad()(
            task.loss_fn, l2_clip_norm=1.0, dtype=jnp.float32
        ),
        **{name: clip(arithmetic=name) for name in ARITHMETICS},
        "book-keeping, bounded": kept(arithmetic="bounded"),
    }


def build(fun: Callable[..., Any], *args: Any) -> tuple[int, float, float]:
    """Lines of the program, and the seconds to lower and to compile it."""
    jax.clear_caches()
    start = time.perf_counter()
    lowered = jax.jit(lambda *xs: fun(*xs)).lower(*args)
    lowered_at = time.perf_counter()
    lowered.compile()
    compiled_at = time.perf_counter()
    num_lines = lowered.as_text().count("\n")
    return num_lines, lowered_at - start, compiled_at - lowered_at


def measure(
    functions: dict[str, Callable[..., Any]], args: tuple[Any, ...], rounds: int
) -> dict[str, dict[str, float]]:
    """Lines and median seconds of every function, by name."""
    built = {name: [] for name in functions}
    for _ in range(rounds):
        for name, fun in functions.items():
            built[name].append(build(fun, *args))
    return {
        name: {
            "lines": rows[0][0],
            "seconds_to_lower": round(statistics.median(r[1] for r in rows), 2),
            "seconds_to_compile": round(statistics.median(r[2] for r in rows), 2),
            "seconds": round(statistics.median(r[1] + r[2] for r in rows), 2),
        }
        for name, rows in built.items()
    }


def summarize(
    measured: dict[str, dict[str, float]], num_arrays: int
) -> dict[str, dict[str, float]]:
    """Lines for each array beyond the plain gradient's, and ratios of seconds."""
    plain, peer = measured["plain"]["lines"], measured["jax_privacy"]["seconds"]
    return {
        name: {
            "lines_per_array": round((figures["lines"] - plain) / num_arrays, 1),
            "time_ratio": round(figures["seconds"] / peer, 2),
            **figures,
        }
        for name, figures in measured.items()
    }


def measure_noise(rounds: int) -> dict[str, dict[str, float]]:
    """Noise for 300 arrays of 30 shapes."""
    privatizer: Any = noise_addition.gaussian_privatizer(
        stddev=1.0, prng_key=jax.random.key(0)
    )
    sizes = [64 * (1 + i % 30) for i in range(300)]
    floats = [jnp.zeros((size, 8)) for size in sizes]
    exact = [
        dpmp.GridArray(jnp.zeros((size, 8), jnp.int32), 2.0**-15) for size in sizes
    ]
    functions = {
        "float sums": lambda state: privatizer.update(floats, state),
        "exact sums": lambda state: privatizer.update(exact, state),
    }
    return measure(functions, (privatizer.init(None),), rounds)


def main() -> None:
    """Builds what was asked for and appends its figures."""
    parser = argparse.ArgumentParser(description="Times the compilation of programs.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--task", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--no-noise", action="store_true")
    args = parser.parse_args()
    append = functools.partial(results.append, "compile_time", rounds=args.rounds)
    for name in args.task:
        task = TASKS[name]()
        num_arrays = len(jax.tree.leaves(task.params))
        measured = measure(contenders(task), (task.params, task.batch), args.rounds)
        append(task=name, arrays=num_arrays, figures=summarize(measured, num_arrays))
    if not args.no_noise:
        append(task="noise", arrays=300, figures=measure_noise(args.rounds))


if __name__ == "__main__":
    main()
