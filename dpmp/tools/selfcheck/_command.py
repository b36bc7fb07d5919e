"""Checks on this machine what dpmp promises of its arithmetic.

A compiler, a device or a library may do what nobody thought of. So the claims are
measured, on synthetic data.
"""

import dataclasses
import importlib.metadata
import json
import math
import pathlib
import platform
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import rich.console
import rich.table

from dpmp.tools.selfcheck._noise import measure_keys, measure_noise
from dpmp.tools.selfcheck._results import Result, Sizes
from dpmp.tools.selfcheck._subjects import Subjects
from dpmp.tools.selfcheck._sums import measure_contributions, measure_sensitivity

_PACKAGES = ("dpmp", "jax", "jaxlib", "numpy")


def run(
    subjects: Subjects, sizes: Sizes, console: rich.console.Console
) -> list[Result]:
    """Measures, and prints the results as they come.

    Args:
      subjects: what to measure.
      sizes: how much of it.
      console: where to print.

    Returns:
      All results.
    """
    environment = _environment()
    versions = [" ".join(item) for item in environment["versions"].items()]
    _print(console, f"{environment['device']}; {', '.join(versions)}")
    results = []
    with console.status("measuring"):
        for part in _parts(subjects, sizes):
            for measurement in dict.fromkeys(x.measurement for x in part):
                _print(console, f"\n{measurement}")
                console.print(_table([x for x in part if x.measurement == measurement]))
            results += part
    _print(console, "\n".join(["", *subjects.remarks, _conclusion(results)]))
    return results


def _parts(subjects: Subjects, sizes: Sizes) -> Iterator[list[Result]]:
    yield [x for sums in subjects.sums for x in measure_contributions(sums, sizes)]
    yield [x for sums in subjects.sums for x in measure_sensitivity(sums, sizes)]
    yield [x for noise in subjects.releases for x in measure_noise(noise, sizes)]
    yield [x for keys in subjects.keys for x in measure_keys(keys)]


def broken_claims(results: Iterable[Result]) -> list[Result]:
    """The results that are not what dpmp promises."""
    return [x for x in results if x.is_claimed and not x.passed]


def _conclusion(results: list[Result]) -> str:
    num_claims = sum(x.is_claimed for x in results)
    if broken := broken_claims(results):
        names = ", ".join(dict.fromkeys(x.subject for x in broken))
        return f"{len(broken)} of {num_claims} claims of dpmp FAIL here: {names}."
    return f"All {num_claims} claims of dpmp hold here."


def _table(results: list[Result]) -> rich.table.Table:
    table = rich.table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", min_width=24, no_wrap=True)
    table.add_column("measured", min_width=8, no_wrap=True)
    table.add_column("allowed", min_width=13, no_wrap=True)
    table.add_column("", min_width=4, no_wrap=True)
    table.add_column("" if not any(x.worst_case for x in results) else "where")
    for x in results:
        table.add_row(
            x.subject,
            _measured(x),
            _allowed(x),
            "[green]ok[/]" if x.passed else "[bold red]FAIL[/]",
            x.worst_case,
        )
    return table


def _measured(result: Result) -> str:
    """As few digits as show whether it passed."""
    rounded = f"{result.value:.5g}"
    return rounded if _is_within(result, float(rounded)) else f"{result.value:.12g}"


def _is_within(result: Result, value: float) -> bool:
    lowest = -math.inf if result.at_least is None else result.at_least
    highest = math.inf if result.at_most is None else result.at_most
    return (lowest <= value <= highest) == result.passed


def _allowed(result: Result) -> str:
    lowest, highest = result.at_least, result.at_most
    if lowest is None:
        return f"<= {highest:.3g}"
    if highest is None:
        return f">= {lowest:.3g}"
    return f"{lowest:.3g} to {highest:.3g}"


def _print(console: rich.console.Console, text: str) -> None:
    console.print(text, markup=False, highlight=False)


def write_json(path: pathlib.Path, results: list[Result]) -> None:
    """Writes the device, versions and results to a file."""
    content = {**_environment(), "results": list(map(as_json, results))}
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")


def as_json(result: Result) -> dict[str, Any]:
    """The fields of a result.

    Numbers that are not finite become strings, since JSON has no numbers for them.
    """

    def value(x: Any) -> Any:
        return str(x) if isinstance(x, float) and not math.isfinite(x) else x

    return {name: value(x) for name, x in dataclasses.asdict(result).items()}


def _environment() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "device": f"{device.device_kind} ({platform.machine()})",
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
    }
