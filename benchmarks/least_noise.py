"""How much noise does a run need for its epsilon, by how its batches are drawn?

A run makes some epochs with a batch size, and is calibrated with Poisson sampling, with
random allocation, and with noise that is correlated over several steps. Quoted are

- noise multipliers of the first two, and the seconds to find them;
- the error of the parameters: the root mean square of the noise in all sums of updates,
  in units of one contribution, by the number of bands (1 is Poisson sampling), for
  matrices with bands and for matrices whose inverse has bands;
- this error with the best number of bands in jax_privacy: its optimized coefficients
  and its accountant, which assumes that no batch is truncated. It adds noise in floats.

    pip install '.[bench]'
    python -m benchmarks.least_noise        # a quarter of an hour on two cores
"""

import functools
import math
import time
from typing import Annotated, Any, NamedTuple

from benchmarks import harness
from dpmp import DPSGD, strategies

_BANDS = (1, 2, 4, 8, 16)


class Setting(NamedTuple):
    """A run, whose number of epochs is fixed."""

    num_examples: int
    batch_size: int
    epochs: int
    delta: float


SETTINGS = {
    "1,500 / 100, 20 epochs": Setting(1_500, 100, 20, 1e-5),
    "5,000 / 250, 10 epochs": Setting(5_000, 250, 10, 1e-5),
    "10,000 / 100, 3 epochs": Setting(10_000, 100, 3, 1e-6),
    "10,000 / 1,000, 30 epochs": Setting(10_000, 1_000, 30, 1e-6),
    "60,000 / 256, 5 epochs": Setting(60_000, 256, 5, 1e-6),
    "60,000 / 600, 10 epochs": Setting(60_000, 600, 10, 1e-6),
    "60,000 / 6,000, 40 epochs": Setting(60_000, 6_000, 40, 1e-6),
    "250,000 / 500, 1 epoch": Setting(250_000, 500, 1, 1e-7),
    "250,000 / 5,000, 3 epochs": Setting(250_000, 5_000, 3, 1e-7),
    "1,000,000 / 1,000, 1 epoch": Setting(1_000_000, 1_000, 1, 1e-7),
    "1,000,000 / 10,000, 5 epochs": Setting(1_000_000, 10_000, 5, 1e-7),
    "5,000,000 / 500, 1 epoch": Setting(5_000_000, 500, 1, 1e-8),
}


def benchmark(
    setting: Annotated[str, harness.Each(SETTINGS)],
    epsilon: Annotated[float, harness.Each(default=(1.0, 3.0, 8.0))],
) -> harness.Lines:
    """A line for each setting and epsilon."""
    chosen = SETTINGS[setting]
    noise, seconds = {}, {}
    for sampling in ("poisson", "random_allocation"):
        start = time.perf_counter()
        mechanism = _mechanism(chosen, epsilon, sampling=sampling)
        noise[sampling] = mechanism.noise_multiplier
        seconds[sampling] = time.perf_counter() - start
    steps = mechanism.iterations
    of_epoch = round(chosen.num_examples / chosen.batch_size)
    banded = functools.partial(strategies.banded_toeplitz, iterations=steps)
    inverse = functools.partial(
        strategies.banded_inverse, iterations=steps, steps_per_epoch=of_epoch
    )
    errors = {
        str(bands): _error(chosen, epsilon, banded(bands))
        for bands in _BANDS
        if bands * chosen.batch_size <= chosen.num_examples
    }
    of_inverse = {
        str(bands): _error(chosen, epsilon, inverse(bands)) for bands in _BANDS[1:]
    }
    best = min(errors, key=errors.__getitem__)
    peer = {}
    if harness.is_installed("jax_privacy"):
        found = _error_in_jax_privacy(chosen, epsilon, int(best), mechanism.iterations)
        peer = {"jax_privacy": found, "of_jax_privacy": errors[best] / found}
    less = 100 * (1 - noise["random_allocation"] / noise["poisson"])
    yield {
        "noise": harness.rounded(noise, 4),
        "less": less,
        "seconds": harness.rounded(seconds, 2),
        "error": harness.rounded(errors, 3),
        "best_bands": int(best),
        "of_inverse": harness.rounded(of_inverse, 3),
        "inverse_over_best": min(of_inverse.values()) / errors[best],
        "less_error": 100 * (1 - errors[best] / errors["1"]),
        **peer,
    }


def _mechanism(setting: Setting, epsilon: float, **fields: Any) -> DPSGD:
    return DPSGD.from_epochs(
        epochs=setting.epochs,
        num_examples=setting.num_examples,
        expected_batch_size=setting.batch_size,
        l2_clip_norm=1.0,
        **fields,
    ).calibrate(epsilon=epsilon, delta=setting.delta)


def _error(setting: Setting, epsilon: float, strategy: strategies.Strategy) -> float:
    """The error of the parameters, for the least noise."""
    mechanism = _mechanism(setting, epsilon, strategy=strategy)
    return (mechanism.noise_multiplier or 0.0) * strategy.error()


def _error_in_jax_privacy(
    setting: Setting, epsilon: float, bands: int, iterations: int
) -> float:
    from jax_privacy.accounting import accountants, analysis, calibrate
    from jax_privacy.matrix_factorization import toeplitz

    accountant = analysis.DpsgdTrainingAccountant(accountants.PldAccountantConfig())
    noise_multiplier = calibrate.calibrate_noise_multiplier(
        target_epsilon=epsilon,
        accountant=accountant,
        batch_sizes=setting.batch_size,
        num_updates=iterations,
        num_samples=setting.num_examples,
        target_delta=setting.delta,
        cycle_length=bands,
        tol=1e-4,
    )
    coefficients = toeplitz.optimize_banded_toeplitz(iterations, bands)
    return noise_multiplier * math.sqrt(toeplitz.loss(coefficients, iterations))


if __name__ == "__main__":
    harness.main(benchmark, tiny={"setting": [*SETTINGS][:1], "epsilon": [8.0]})
