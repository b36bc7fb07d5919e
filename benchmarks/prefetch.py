"""Does loading in the background hide the time that batches take to load?

`DPTrainer.fit` trains a tiny model. Its source waits for 5 ms before each batch, as a
disk would, and a callback waits for 10 ms after each step, as for a device. Measured
are the milliseconds of a step (medians over rounds in which all contenders run in
turn), next to the same data in memory.

    python -m benchmarks.prefetch        # half a minute on two cores
"""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

import dpmp
from benchmarks import harness
from benchmarks.steps import make_trainer

NUM_EXAMPLES, WIDTH = 4096, 4
LOADING_SECONDS, DEVICE_SECONDS = 0.005, 0.01


class SlowSource:
    """Arrays behind a slow disk."""

    def __init__(self, arrays: dict[str, np.ndarray]):
        self._arrays = arrays

    def __len__(self) -> int:
        return NUM_EXAMPLES

    def __getitem__(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The examples at these indices."""
        if not np.ndim(indices):
            raise TypeError("an array, please")
        time.sleep(LOADING_SECONDS)
        return {name: x[indices] for name, x in self._arrays.items()}


def wait_for_the_device(state: dpmp.TrainingState) -> None:
    """What a callback does that looks at the state."""
    jax.block_until_ready(state.step)
    time.sleep(DEVICE_SECONDS)


def benchmark(steps: int = 100, rounds: int = 5) -> harness.Lines:
    """A line for all contenders."""
    rng = np.random.default_rng(0)
    data = {
        "x": rng.normal(size=(NUM_EXAMPLES, WIDTH)).astype(np.float32),
        "y": rng.normal(size=NUM_EXAMPLES).astype(np.float32),
    }
    trainer = make_trainer(
        lambda w, batch: jnp.mean((batch["x"] @ w - batch["y"]) ** 2),
        "float32",
        jax.random.key(0),
        num_examples=NUM_EXAMPLES,
        expected_batch_size=32,
        iterations=steps,
    )

    def run(source: object, prefetch: int) -> jax.Array:
        options = {"progress": False, "callback": wait_for_the_device}
        state = trainer.init(jnp.zeros(WIDTH))
        return trainer.fit(state, source, prefetch=prefetch, **options).step

    contenders = {
        "in memory": functools.partial(run, data, 0),
        "slow source, prefetch=0": functools.partial(run, SlowSource(data), 0),
        "slow source, prefetch=2": functools.partial(run, SlowSource(data), 2),
    }
    seconds = harness.in_turn(contenders, rounds).medians()
    yield {
        "loading_milliseconds": 1e3 * LOADING_SECONDS,
        "device_milliseconds": 1e3 * DEVICE_SECONDS,
        "step_milliseconds": harness.rounded(seconds, 2, unit=1e-3 * steps),
    }


if __name__ == "__main__":
    harness.main(benchmark, tiny={"steps": 3, "rounds": 1})
