"""What do the files of a run cost, and how long does it take to go on from them?

Two runs of the model of `examples/finetune_transformer.py` take turns, with the same
batches: `fit(progress=False)`, and `fit(checkpoint_dir=...)` with checkpoints, ledger,
metrics and progress. A round has `--steps` steps of each run and one checkpoint.
Compared are the times from the end of the first step to that of the last. The time to
compute epsilon is left out, which `fit` limits to one per cent of a run.

Then a model of 17 million parameters is saved and goes on, with a new trainer that has
to compile the step again.

    python -m benchmarks.long_runs             # under six minutes on two cores
    python -m benchmarks.long_runs --tiny      # a rehearsal, which records nothing

Every line is appended to benchmarks/results/long_runs.jsonl.
"""

import argparse
import functools
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import dpmp
from benchmarks import example_files, results
from dpmp import runs
from dpmp.runs._checkpoints import Checkpoints
from dpmp.tools import _timing

example = example_files.load("finetune_transformer")

_EXAMPLES = 7737


def transformer(*, batch_size: int, iterations: int) -> tuple[dpmp.DPTrainer, Any, Any]:
    """The trainer, parameters and data of the example, with tokens that are random."""
    model = example.Transformer(nnx.Rngs(0))
    graphdef, params = nnx.split(model, nnx.Param)

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        nats, counts = example.losses(graphdef, params, tokens)
        return nats[0] / counts[0]

    mechanism = dpmp.DPSGD(
        num_examples=_EXAMPLES,
        expected_batch_size=batch_size,
        iterations=iterations,
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        delta=1e-5,
        microbatch_size=8,
    )
    trainer = dpmp.DPTrainer(
        mechanism=mechanism,
        loss_fn=loss_fn,
        optimizer=optax.adam(1e-3),
        policy=dpmp.Policy.from_name(
            "mixed_bfloat16", float32_paths=example.IN_FLOAT32
        ),
    )
    shape = (_EXAMPLES, example.CONTEXT + 1)
    tokens = np.random.default_rng(0).integers(1, 256, shape, dtype=np.int32)
    return trainer, params, tokens


def dense(width: int) -> tuple[dpmp.DPTrainer, Any, Any]:
    """A trainer whose model has four layers of `width` squared parameters."""

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        for matrix in params:
            x = jnp.tanh(x @ matrix)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    mechanism = dpmp.DPSGD(
        num_examples=100,
        expected_batch_size=2,
        num_parameters=4 * width**2,
        iterations=100,
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        delta=1e-5,
    )
    trainer = dpmp.DPTrainer(
        mechanism=mechanism,
        loss_fn=loss_fn,
        optimizer=optax.adam(1e-3),
        policy="mixed_bfloat16",
    )
    params = [jnp.eye(width) for _ in range(4)]
    return trainer, params, np.ones((100, width), np.float32)


class Run:
    """A run in parts, whose steps are timed without those that compile."""

    def __init__(self, trainer: dpmp.DPTrainer, params: Any, data: Any, **options: Any):
        """Prepares a run; `options` are those of `fit`."""
        key = jax.random.key(0)  # all runs draw the same batches
        self.state = trainer.init(params, prng_key=key)
        self._fit = functools.partial(trainer.fit, source=data, **options)

    def seconds(self, steps: int) -> float:
        """Makes steps; returns the seconds for one, without the first."""
        ends = []
        number = 0

        def callback(state: dpmp.TrainingState) -> None:
            nonlocal number
            number += 1
            if number in (1, steps):
                jax.block_until_ready(state.params)
                ends.append(time.perf_counter())

        stop = int(self.state.step) + steps
        self.state = self._fit(self.state, stop_at=stop, callback=callback)
        return (ends[1] - ends[0]) / (steps - 1)


def cost(rounds: int, steps: int, batch_size: int) -> dict[str, Any]:
    """Compares a run with a directory to one without, round by round."""
    # Each part has a checkpoint in its middle. Another one begins with its last step,
    # and most of it is written after the clock has stopped.
    steps += steps % 2
    iterations = (rounds + 1) * steps
    task = transformer(batch_size=batch_size, iterations=iterations)
    with tempfile.TemporaryDirectory() as directory:
        files = {"checkpoint_dir": f"{directory}/run", "every": steps // 2}
        contenders = {
            "plain": Run(*task, progress=False),
            "with files": Run(*task, **files),
        }
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for i in range(rounds + 1):
            for name in sorted(contenders, reverse=bool(i % 2)):
                seconds[name].append(contenders[name].seconds(steps))
        trainer, _, data = task
        state = contenders["with files"].state
        first = trainer.init(task[1], prng_key=jax.random.key(0))
        returns, written = _saving(state, pathlib.Path(directory))
        parts = {
            "save_returns": returns,
            "save_is_written": written,
            "ledger_record": _ledger_record(trainer.mechanism),
            "batch_is_drawn": _median(lambda _: trainer.load_batch(first, data), 20),
        }
    counted = {name: times[1:] for name, times in seconds.items()}
    plain = statistics.median(counted["plain"])
    return {
        "batch_size": batch_size,
        "steps_of_a_round": steps,
        "rounds": rounds,
        "step_seconds": {k: _round(statistics.median(x)) for k, x in counted.items()},
        "time_ratio": round(
            _timing.median_ratio(counted["with files"], counted["plain"]), 4
        ),
        "ratios": [
            round(a / b, 4)
            for a, b in zip(counted["with files"], counted["plain"], strict=True)
        ],
        "seconds": {name: _round(x) for name, x in parts.items()},
        "drawing_share": round(parts["batch_is_drawn"] / plain, 4),
    }


def resume(width: int) -> dict[str, Any]:
    """Saves a run after two steps, and goes on with a new trainer."""
    trainer, params, data = dense(width)
    with tempfile.TemporaryDirectory() as directory:
        options = {"checkpoint_dir": directory, "every": 2, "progress": False}
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

        state = trainer.fit(state, data, stop_at=4, callback=callback, **options)
        returns, written = _saving(state, pathlib.Path(directory))
    return {
        "parameters": 4 * width**2,
        "megabytes": round(sum(x.nbytes for x in _arrays(state)) / 1e6),
        "seconds": {
            "restore": _round(restored - begin),
            "until_the_first_step": _round(at[0] - begin),
            "a_step": _round(at[1] - at[0]),
            "save_returns": _round(returns),
            "save_is_written": _round(written),
        },
    }


def _arrays(state: dpmp.TrainingState) -> list[jax.Array]:
    return jax.tree.leaves((state.params, state.opt_state))


def _saving(state: dpmp.TrainingState, directory: pathlib.Path) -> tuple[float, float]:
    """Seconds until `save` returns, and until the files are written: medians of 5."""
    returns, written = [], []
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        checkpoints = Checkpoints(pathlib.Path(folder))
        for step in range(6):
            begin = time.perf_counter()
            checkpoints.save(step, state)
            returns.append(time.perf_counter() - begin)
            checkpoints.wait()
            written.append(time.perf_counter() - begin)
        checkpoints.close()
    return statistics.median(returns[1:]), statistics.median(written[1:])


def _ledger_record(mechanism: dpmp.DPSGD) -> float:
    with tempfile.TemporaryDirectory() as folder, runs.locked(folder) as path:
        entry = runs.Ledger.open(path).entry(
            mechanism, key_fingerprint="0" * 32, data_tag="0" * 32
        )
        return _median(lambda i: entry.begin(i, i + 1), 20)


def _median(function: Callable[[int], Any], times: int) -> float:
    seconds = []
    for i in range(times):
        begin = time.perf_counter()
        function(i)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _round(seconds: float) -> float:
    return float(f"{seconds:.3g}")


def main() -> None:
    """Measures, and appends the figures."""
    parser = argparse.ArgumentParser(description="Measures what files of a run cost.")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--tiny", action="store_true", help="record nothing")
    args = parser.parse_args()
    if args.tiny:
        figures = [cost(1, 4, 4), resume(64)]
        sys.stdout.write(json.dumps(figures, indent=2) + "\n")
        return
    figures = cost(args.rounds, args.steps, args.batch_size)
    results.append("long_runs", question="cost", **figures)
    results.append("long_runs", question="resume", **resume(2050))


if __name__ == "__main__":
    main()
