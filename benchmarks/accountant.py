"""What do accounting and calibration take, next to dp_accounting used directly?

dp_accounting does the analysis in both cases. `dpmp.accounting` chooses its accountant
and its grid, charges their rounding errors to the result, and searches for the noise
multiplier. "Directly" is the accountant for privacy loss distributions with its
defaults, and `calibrate_dp_mechanism` with the tolerance of dpmp: 1e-4 of the noise
multiplier. Both account for the neighbouring relation REPLACE_SPECIAL. Quoted are
seconds, in turn, epsilon, and the noise multiplier with the epsilon that dp_accounting
finds for it.

    python -m benchmarks.accountant       # four minutes on two cores
    python -m benchmarks.accountant --setting small --rounds 1 --out /tmp/tiny

Every line is appended to benchmarks/results/accountant.jsonl.
"""

import argparse
import functools
import pathlib
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import dp_accounting
from dp_accounting import pld

from benchmarks import results
from dpmp import accounting
from dpmp.tools import _timing


class Setting(NamedTuple):
    """A run to account for, and the epsilon to calibrate its noise to."""

    iterations: int
    sampling_prob: float
    delta: float
    epsilon: float


SETTINGS = {
    "small": Setting(100, 0.05, 1e-5, 3.0),
    "ten epochs": Setting(1_000, 0.01, 1e-6, 2.0),
    "long": Setting(10_000, 0.001, 1e-7, 2.0),
}
_TOLERANCE = 1e-4  # of a calibrated noise multiplier


def epsilon_directly(setting: Setting, noise_multiplier: float) -> float:
    """By the accountant's defaults."""
    accountant = pld.PLDAccountant(accounting.DEFAULT_RELATION)
    accountant.compose(_event(setting, noise_multiplier))
    return accountant.get_epsilon(setting.delta)


def calibrate_directly(setting: Setting) -> float:
    """By the search of dp_accounting."""
    return dp_accounting.calibrate_dp_mechanism(
        functools.partial(pld.PLDAccountant, accounting.DEFAULT_RELATION),
        functools.partial(_event, setting),
        setting.epsilon,
        setting.delta,
        dp_accounting.LowerEndpointAndGuess(0.3, 1.0),
        tol=_TOLERANCE,
    )


def _event(setting: Setting, noise_multiplier: float) -> dp_accounting.DpEvent:
    return accounting.dpsgd_event(
        noise_multiplier,
        iterations=setting.iterations,
        sampling_prob=setting.sampling_prob,
    )


def contenders(
    setting: Setting, noise_multiplier: float
) -> dict[str, Callable[[], Any]]:
    """Functions without arguments, by name."""
    event = _event(setting, noise_multiplier)
    return {
        "epsilon, dpmp": lambda: (
            accounting.get_epsilon(event, delta=setting.delta).epsilon
        ),
        "epsilon, directly": lambda: epsilon_directly(setting, noise_multiplier),
        "calibration, dpmp": lambda: accounting.calibrate_noise_multiplier(
            functools.partial(_event, setting),
            epsilon=setting.epsilon,
            delta=setting.delta,
        ),
        "calibration, directly": lambda: calibrate_directly(setting),
    }


def measure(setting: Setting, rounds: int) -> dict[str, Any]:
    """The figures of a line."""
    functions = contenders(setting, 1.0)
    values = {name: call() for name, call in functions.items()}
    seconds = _timing.in_turn(functions, rounds)
    return {
        "seconds": {k: round(statistics.median(x), 4) for k, x in seconds.items()},
        "time_ratio": {
            what: round(
                _timing.median_ratio(
                    seconds[f"{what}, dpmp"], seconds[f"{what}, directly"]
                ),
                3,
            )
            for what in ("epsilon", "calibration")
        },
        "values": values,
        "epsilon_of_calibrated": {
            name: epsilon_directly(setting, values[f"calibration, {name}"])
            for name in ("dpmp", "directly")
        },
    }


def main() -> None:
    """Measures what was asked for and appends a line for each."""
    parser = argparse.ArgumentParser(description="Times accounting.")
    parser.add_argument("--setting", choices=SETTINGS, nargs="*", default=[*SETTINGS])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=pathlib.Path, default=results.RESULTS)
    args = parser.parse_args()
    for name in args.setting:
        setting = SETTINGS[name]
        results.append_to(
            args.out,
            "accountant",
            setting=name,
            **setting._asdict(),
            rounds=args.rounds,
            **measure(setting, args.rounds),
        )


if __name__ == "__main__":
    main()
