"""What do accounting and calibration take, next to dp_accounting used directly?

dp_accounting does the analysis in both cases. `dpmp.accounting` chooses its accountant
and its grid, charges their rounding errors to the result, and searches for the noise
multiplier. "Directly" is the accountant for privacy loss distributions with its
defaults, and `calibrate_dp_mechanism` with the tolerance of dpmp: 1e-4 of the noise
multiplier. Both account for the neighbouring relation REPLACE_SPECIAL. Quoted are
seconds, in turn, epsilon, and the noise multiplier with the epsilon that dp_accounting
finds for it.

    python -m benchmarks.accountant       # four minutes on two cores
"""

import functools
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import dp_accounting
from dp_accounting import pld

from benchmarks import harness
from dpmp import accounting


class Setting(NamedTuple):
    """A run to account for, and the epsilon to calibrate its noise to."""

    iterations: int
    sampling_prob: float
    delta: float
    epsilon: float

    def event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        """What is accounted for."""
        run = {"iterations": self.iterations, "sampling_prob": self.sampling_prob}
        return accounting.dpsgd_event(noise_multiplier, **run)


SETTINGS = {
    "small": Setting(100, 0.05, 1e-5, 3.0),
    "ten epochs": Setting(1_000, 0.01, 1e-6, 2.0),
    "long": Setting(10_000, 0.001, 1e-7, 2.0),
}
_TOLERANCE = 1e-4  # of a calibrated noise multiplier


def epsilon_directly(setting: Setting, noise_multiplier: float) -> float:
    """By the accountant's defaults."""
    accountant = pld.PLDAccountant(accounting.DEFAULT_RELATION)
    accountant.compose(setting.event(noise_multiplier))
    return accountant.get_epsilon(setting.delta)


def calibrate_directly(setting: Setting) -> float:
    """By the search of dp_accounting."""
    return dp_accounting.calibrate_dp_mechanism(
        functools.partial(pld.PLDAccountant, accounting.DEFAULT_RELATION),
        setting.event,
        setting.epsilon,
        setting.delta,
        dp_accounting.LowerEndpointAndGuess(0.3, 1.0),
        tol=_TOLERANCE,
    )


def measure(setting: Setting, rounds: int) -> dict[str, Any]:
    """The figures of a line."""
    event, delta, both = setting.event(1.0), setting.delta, ("dpmp", "directly")
    functions: dict[str, Callable[[], float]] = {
        "epsilon, dpmp": lambda: accounting.get_epsilon(event, delta=delta).epsilon,
        "epsilon, directly": lambda: epsilon_directly(setting, 1.0),
        "calibration, dpmp": lambda: accounting.calibrate_noise_multiplier(
            setting.event, epsilon=setting.epsilon, delta=delta
        ),
        "calibration, directly": lambda: calibrate_directly(setting),
    }
    values = {name: call() for name, call in functions.items()}
    measured = harness.in_turn(functions, rounds)
    return {
        "seconds": harness.rounded(measured.medians(), 4),
        "time_ratio": {
            what: measured.ratio(*(f"{what}, {name}" for name in both))
            for what in ("epsilon", "calibration")
        },
        "values": values,
        "epsilon_of_calibrated": {
            name: epsilon_directly(setting, values[f"calibration, {name}"])
            for name in both
        },
    }


def benchmark(
    setting: Annotated[str, harness.Each(SETTINGS)], rounds: int = 2
) -> harness.Lines:
    """A line for each setting."""
    chosen = SETTINGS[setting]
    yield {**chosen._asdict(), **measure(chosen, rounds)}


if __name__ == "__main__":
    harness.main(benchmark, tiny={"setting": ["small"], "rounds": 1})
