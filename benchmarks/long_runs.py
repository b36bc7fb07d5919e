"""What do the files of a run cost, and how long does it take to go on from them?

The model of `examples/finetune_transformer.py` is trained with the same batches by
`fit(progress=False)`, by `fit()`, whose progress goes to a file, and by
`fit(checkpoint_dir=...)`, which take turns. A round has `--steps` steps of each, which
one checkpoint releases. Then every step is released, which tells the time of a release.

Then a model of 17 million parameters is saved and goes on, with a new trainer that has
to compile the step again.

    python -m benchmarks.long_runs             # ten minutes on two cores
"""

import contextlib
import functools
import itertools
import os
import statistics
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import dpmp
from benchmarks import harness, models, steps

example: Any = models.example("finetune_transformer")

_EXAMPLES = 7737


def transformer(*, batch_size: int, iterations: int) -> tuple[dpmp.DPTrainer, Any, Any]:
    """The trainer, parameters and data of the example, with tokens that are random."""
    graphdef, params = nnx.split(example.Transformer(nnx.Rngs(0)), nnx.Param)

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        nats, counts = example.losses(graphdef, params, tokens)
        return nats[0] / counts[0]

    trainer = steps.make_trainer(
        loss_fn,
        dpmp.Policy.from_name("mixed_bfloat16", float32_paths=example.IN_FLOAT32),
        jax.random.key(0),  # the same batches, whose sizes differ otherwise
        delta=1e-5,
        num_examples=_EXAMPLES,
        expected_batch_size=batch_size,
        iterations=iterations,
        microbatch_size=8,
    )
    shape = (_EXAMPLES, example.CONTEXT + 1)
    tokens = np.random.default_rng(0).integers(1, 256, shape, dtype=np.int32)
    return trainer, params, tokens


def dense(width: int) -> tuple[dpmp.DPTrainer, Any, Any]:
    """A trainer whose model has four layers of `width` squared parameters."""
    task = models.square_layers(jnp.float32, 100, width=width, depth=4)
    trainer = steps.make_trainer(
        task.loss_fn,
        "mixed_bfloat16",
        delta=1e-5,
        num_examples=100,
        expected_batch_size=2,
        num_parameters=4 * width**2,
        iterations=100,
    )
    return trainer, task.params, np.asarray(task.batch)


def fit(task: tuple[dpmp.DPTrainer, Any, Any], steps: int, **options: Any) -> float:
    """Makes steps from the beginning; returns the seconds for one."""
    trainer, params, data = task
    state = trainer.init(params)
    begin = time.perf_counter()
    state = trainer.fit(state, data, stop_at=steps, **options)
    jax.block_until_ready(state.params)
    return (time.perf_counter() - begin) / steps


def fit_in_directory(task: Any, num_steps: int, **options: Any) -> float:
    """The same with a directory, for all steps together or for each."""
    with tempfile.TemporaryDirectory() as directory:
        options |= {"checkpoint_dir": directory, "progress": False}
        return fit(task, num_steps, **options)


def fit_with_progress(task: Any, num_steps: int) -> float:
    """The same with progress, which goes nowhere."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        return fit(task, num_steps)


def cost(rounds: int, steps: int, batch_size: int) -> dict[str, Any]:
    """Compares runs with and without files and progress, round by round."""
    task = transformer(batch_size=batch_size, iterations=steps)
    contenders = {
        "plain": functools.partial(fit, task, steps, progress=False),
        "progress": functools.partial(fit_with_progress, task, steps),
        "directory": functools.partial(fit_in_directory, task, steps, every=steps),
        "every=1": functools.partial(fit_in_directory, task, steps, every=1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(rounds + 1):
        for name in sorted(contenders, reverse=bool(i % 2)):
            seconds[name].append(contenders[name]())
    measured = harness.Measured({name: times[1:] for name, times in seconds.items()})
    median = measured.medians()
    return {
        "steps_of_a_round": steps,
        "step_seconds": {name: _round(x) for name, x in median.items()},
        "release_seconds": _round(median["every=1"] - median["plain"]),
        "time_ratio": {
            k: measured.ratio(k, "plain") for k in ("progress", "directory")
        },
    }


def resume(width: int) -> dict[str, Any]:
    """Saves a run after two steps, and goes on with a new trainer."""
    trainer, params, data = dense(width)
    with tempfile.TemporaryDirectory() as directory:
        options = {"checkpoint_dir": directory, "progress": False}
        trainer.fit(trainer.init(params), data, stop_at=2, **options)
        # Another trainer has another program.
        jax.clear_caches()
        trainer, params, data = dense(width)
        begin = time.perf_counter()
        state = trainer.init_or_restore(params, directory)
        restored = time.perf_counter()
        at = []

        def callback(state: dpmp.TrainingState) -> None:
            jax.block_until_ready(state.params)
            at.append(time.perf_counter())

        state = trainer.fit(
            state, data, stop_at=6, every=1, callback=callback, **options
        )
    step = fit((trainer, params, data), 4, progress=False)
    arrays = jax.tree.leaves((state.params, state.opt_state))
    with_release = statistics.median(b - a for a, b in itertools.pairwise(at))
    return {
        "parameters": 4 * width**2,
        "megabytes": round(sum(x.nbytes for x in arrays) / 1e6),
        "seconds": {
            "restore": _round(restored - begin),
            "until_the_first_release": _round(at[0] - begin),
            "a_step": _round(step),
            "release": _round(with_release - step),
        },
    }


def _round(seconds: float) -> float:
    return float(f"{seconds:.3g}")


def benchmark(
    rounds: int = 4,
    steps: int = 150,  # the first line and the first epsilon come once in a round
    batch_size: int = 32,
    width: int = 2050,
) -> harness.Lines:
    """A line for what files cost, and one for going on."""
    yield {"question": "files", **cost(rounds, steps, batch_size)}
    yield {"question": "going on", **resume(width)}


if __name__ == "__main__":
    tiny = {"rounds": 1, "steps": 4, "batch_size": 4, "width": 64}
    harness.main(benchmark, tiny=tiny)
