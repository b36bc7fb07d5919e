"""Checks on this machine the promises that dpmp makes of its arithmetic.

A compiler, a device or a library may behave as nobody expects. So the promises are
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
from dpmp.tools.selfcheck._results import Result, Sizes, is_within
from dpmp.tools.selfcheck._subjects import Subjects
from dpmp.tools.selfcheck._sums import measure_contributions, measure_sensitivity

_PACKAGES = ("dpmp", "jax", "jaxlib", "numpy")


def run(
    subjects: Subjects, sizes: Sizes, console: rich.console.Console
) -> list[Result]:
    """Measures all subjects, and prints each result as soon as it is known."""

    def show(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    environment = _environment()
    versions = [" ".join(item) for item in environment["versions"].items()]
    show(f"{environment['device']}; {', '.join(versions)}")
    results = []
    with console.status("measuring"):
        for part in parts(subjects, sizes):
            for measurement in dict.fromkeys(x.measurement for x in part):
                show(f"\n{measurement}")
                console.print(_table([x for x in part if x.measurement == measurement]))
            results += part
    show("\n".join(["", *subjects.remarks, _conclusion(results)]))
    return results


def parts(subjects: Subjects, sizes: Sizes) -> Iterator[list[Result]]:
    """The results of each kind of measurement, one kind after the other."""
    yield [x for sums in subjects.sums for x in measure_contributions(sums, sizes)]
    yield [x for sums in subjects.sums for x in measure_sensitivity(sums, sizes)]
    yield [x for noise in subjects.releases for x in measure_noise(noise, sizes)]
    yield [x for keys in subjects.keys for x in measure_keys(keys)]


def broken_claims(results: Iterable[Result]) -> list[Result]:
    """The results that break a promise of dpmp."""
    return [x for x in results if x.is_claimed and not x.passed]


def _conclusion(results: list[Result]) -> str:
    num_claims = sum(x.is_claimed for x in results)
    if broken := broken_claims(results):
        names = ", ".join(dict.fromkeys(x.subject for x in broken))
        return f"{len(broken)} of {num_claims} claims of dpmp FAIL here: {names}."
    return f"All {num_claims} claims of dpmp hold here."


def _table(results: list[Result]) -> rich.table.Table:
    table = rich.table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    where = "where" if any(x.worst_case for x in results) else ""
    for name, width in (("", 24), ("measured", 8), ("allowed", 13), ("", 4)):
        table.add_column(name, min_width=width, no_wrap=True)
    table.add_column(where)
    claimed = [x for x in results if x.is_claimed]
    others = [x for x in results if not x.is_claimed]
    for x in claimed:
        verdict = "[green]ok[/]" if x.passed else "[bold red]FAIL[/]"
        table.add_row(x.subject, _measured(x), _allowed(x), verdict, x.worst_case)
    if claimed and others:
        table.add_row("without a claim:")
    for x in others:
        verdict = "ok" if x.passed else "fails"
        table.add_row(
            f"  {x.subject}", _measured(x), _allowed(x), verdict, x.worst_case
        )
    return table


def _measured(x: Result) -> str:
    """As few digits as show whether it passed."""
    rounded = f"{x.value:.5g}"
    shows = is_within(float(rounded), x.at_least, x.at_most) == x.passed
    return rounded if shows else f"{x.value:.12g}"


def _allowed(x: Result) -> str:
    if x.at_least is None:
        return f"<= {x.at_most:.3g}"
    if x.at_most is None:
        return f">= {x.at_least:.3g}"
    return f"{x.at_least:.3g} to {x.at_most:.3g}"


def write_json(path: pathlib.Path, results: list[Result]) -> None:
    """Writes the device, versions and results to a file."""
    content = {**_environment(), "results": list(map(as_json, results))}
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")


def as_json(result: Result) -> dict[str, Any]:
    """The fields of a result; strings replace numbers that JSON cannot express."""
    return {
        name: str(x) if isinstance(x, float) and not math.isfinite(x) else x
        for name, x in dataclasses.asdict(result).items()
    }


def _environment() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "device": f"{device.device_kind} ({platform.machine()})",
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
    }
