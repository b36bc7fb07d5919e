"""How accurate is a model at equal epsilon, by how batches are drawn and noise related?

The network and the images are those of `utility.py`. It is trained by SGD for four
epochs, or for one with smaller batches, with Poisson sampling, with random allocation,
and with noise that is correlated over several steps. Batch sizes, and the learning rate
for four epochs, were chosen by looking at runs with Poisson sampling on these data. For
one epoch, each row has the better one of two learning rates. Both is fine for public
data only.

    python -m benchmarks.accuracy_by_noise                    # an hour on two cores
    python -m benchmarks.accuracy_by_noise --data digits --epsilon 1

A line has the mean and the standard error of loss and accuracy on held-out images. A
seed decides the split and the first parameters, alike in all rows.
"""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import optax

import dpmp
from benchmarks import harness, utility
from dpmp import strategies


class Setting(NamedTuple):
    """How long a network is trained, and in which batches."""

    epochs: int
    batch_size: int
    learning_rates: tuple[float, ...]


SETTINGS = {
    "digits": Setting(4, 48, (1.0,)),
    "digits, one epoch": Setting(1, 12, (0.5, 1.0)),
}

NOISES: dict[str, Any] = {
    "Poisson": {},
    "random allocation": {"sampling": "random_allocation"},
    **{f"{bands} bands": {"bands": bands} for bands in (2, 4, 8, 16)},
    **{
        f"{bands} bands of the inverse": {"bands": bands, "is_inverse": True}
        for bands in (2, 8)
    },
}


def benchmark(
    data: Annotated[str, harness.Each(SETTINGS)],
    epsilon: Annotated[float, harness.Each(default=(1.0, 8.0))],
    noise: Annotated[str, harness.Each(NOISES)],
    seeds: int = 40,
) -> harness.Lines:
    """A line for each data set, epsilon and kind of noise."""
    setting = SETTINGS[data]
    splits = [utility.digits(seed) for seed in range(seeds)]
    mechanism = _mechanism(len(splits[0][0]["label"]), setting, **NOISES[noise])
    mechanism = mechanism.calibrate(epsilon=epsilon, delta=utility.DELTA)
    found = [
        {"learning_rate": rate, **_measure(mechanism, rate, splits)}
        for rate in setting.learning_rates
    ]
    yield {
        "delta": utility.DELTA,
        "steps": mechanism.iterations,
        "batch_size": setting.batch_size,
        "noise_multiplier": mechanism.noise_multiplier,
        "seeds": seeds,
        **min(found, key=lambda x: x["loss"]["mean"]),
    }


def _measure(
    mechanism: dpmp.DPSGD, learning_rate: float, splits: list[Any]
) -> dict[str, Any]:
    trainer = dpmp.DPTrainer(
        mechanism=mechanism,
        loss_fn=utility.loss_fn,
        optimizer=optax.sgd(learning_rate),
        policy="float32",
    )
    found = []
    for seed, (train, held_out) in enumerate(splits):
        initial = utility.network(train["features"].shape[1], seed)
        params = trainer.fit(trainer.init(initial), train, progress=False).params
        found.append(utility.scores(params, held_out))
    losses, accuracies = zip(*found, strict=True)
    return {"loss": _with_error(losses), "accuracy": _with_error(accuracies)}


def _mechanism(
    num_examples: int,
    setting: Setting,
    bands: int = 1,
    is_inverse: bool = False,
    **fields: Any,
) -> dpmp.DPSGD:
    of_epoch = round(num_examples / setting.batch_size)
    sizes = {"iterations": setting.epochs * of_epoch}
    if is_inverse:
        strategy = strategies.banded_inverse(bands, **sizes, steps_per_epoch=of_epoch)
    else:
        strategy = strategies.banded_toeplitz(bands, **sizes)
    return dpmp.DPSGD(
        num_examples=num_examples,
        expected_batch_size=setting.batch_size,
        l2_clip_norm=1.0,
        strategy=strategy,
        num_parameters=100_000,
        **sizes,
        **fields,
    )


def _with_error(values: Sequence[float]) -> dict[str, float]:
    mean, error = harness.mean_and_error(values)
    return {"mean": round(mean, 4), "error": round(error, 4) if values[1:] else 0.0}


if __name__ == "__main__":
    tiny = {"data": ["digits"], "epsilon": [8.0], "noise": ["2 bands"], "seeds": 1}
    harness.main(benchmark, tiny=tiny)
