"""The command `ledger` of `python -m dpmp`."""

import argparse
import json
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import rich.console

from dpmp import _validate, accounting
from dpmp.accounting import round_up
from dpmp.accounting._rounding import digits_above, digits_below
from dpmp.runs import _files
from dpmp.runs._history import History, Run, guarantee, repeated_noise

_EXAMPLE = "python -m dpmp ledger runs/first runs/second --delta 1e-6"

_COUNTING = (
    "Every step that was begun counts, whether it was completed or not. A step that is "
    "repeated with the same key and data releases the same values again and counts "
    "once. Everything else adds up, as if all runs used the data of the same people."
)


def add_ledger_command(commands: Any) -> None:
    """Adds the command to the subparsers of `argparse`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "ledger",
        help="add up the epsilon of all runs in directories",
        description="Reads the privacy ledgers of directories, without changing them, "
        "and computes the epsilon of every step that was ever begun.",
        epilog=_EXAMPLE,
    )
    parser.add_argument(
        "directories",
        nargs="+",
        type=pathlib.Path,
        metavar="DIR",
        help="a directory of runs; those of several directories are composed",
    )
    parser.add_argument(
        "--delta", type=float, metavar="X", help="default: the delta of the runs"
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead of text"
    )
    parser.set_defaults(command=_ledger)


class _Row(NamedTuple):
    """A run, the directories that have its steps, and its guarantee alone."""

    run: Run
    directories: list[str]
    guarantee: accounting.PrivacyGuarantee


class _Report(NamedTuple):
    """All runs, their guarantee together, and whatever else should be known."""

    rows: list[_Row]
    total: accounting.PrivacyGuarantee
    notes: list[str]


def _ledger(args: argparse.Namespace) -> int:
    report = _report(args.directories, args.delta)
    if args.json:
        sys.stdout.write(json.dumps(_as_json(report)) + "\n")
    else:
        console = rich.console.Console(soft_wrap=True, highlight=False, markup=False)
        console.print(_as_text(report))
    return 0


def _report(directories: Sequence[pathlib.Path], delta: float | None) -> _Report:
    files = {str(directory): _read(directory) for directory in directories}
    places = {name: History(file.records) for name, file in files.items()}
    history = History(record for file in files.values() for record in file.records)
    delta = _common_delta(history.runs) if delta is None else delta
    rows = [
        _Row(
            run,
            [x for x, place in places.items() if place.run(*run.identity).steps],
            guarantee([run], delta=delta),
        )
        for run in history.runs
    ]
    incomplete = {x: f.size - f.end for x, f in files.items() if f.size > f.end}
    notes = [
        f"The ledger in {name} ends with an incomplete record of {size} bytes, whose "
        f"steps have not begun. Either a run is writing it now, or a run was killed. "
        f"The next run removes it."
        for name, size in incomplete.items()
    ]
    notes += [
        f"The runs with the key {one.key:.8} added the same noise to different sums. "
        f"It cancels in the difference, and so there is no finite epsilon."
        for one, _ in repeated_noise(history.runs)
    ]
    return _Report(rows, guarantee(history.runs, delta=delta), notes)


def _read(directory: pathlib.Path) -> _files.Parsed:
    try:
        file = _files.read(directory)
        reason = "there is none"
    except OSError as error:
        file, reason = None, error.strerror or str(error)
    if file is None:
        _validate.fail(
            "every directory must have a ledger that can be read",
            directory=str(directory),
            reason=reason,
            fix="Pass the directories that runs were started with.",
        )
    return file


def _common_delta(runs: Sequence[Run]) -> float:
    deltas = {delta for run in runs for delta in run.deltas}
    _validate.require(
        len(deltas) == 1,
        "all runs must have one delta, or a delta must be given",
        deltas=sorted(deltas),
        fix="Pass --delta, well below 1 over the number of examples.",
    )
    return deltas.pop()


def _as_json(report: _Report) -> dict[str, Any]:
    rows = [
        {
            "directories": row.directories,
            "key": row.run.key,
            "data": row.run.data,
            "first_time": row.run.first_time,
            "last_time": row.run.last_time,
            "noise_multiplier": row.run.cost.noise_multiplier,
            "steps": row.run.num_steps,
            "repeated": row.run.num_begun - row.run.num_steps,
            "epsilon": _finite(row.guarantee.epsilon),
        }
        for row in report.rows
    ]
    return {
        "epsilon": _finite(report.total.epsilon),
        "delta": report.total.delta,
        "accountant": report.total.accountant,
        "neighboring_relation": report.total.neighboring_relation,
        "runs": rows,
        "notes": report.notes,
    }


def _finite(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None  # JSON has no infinity


def _as_text(report: _Report) -> str:
    total = report.total
    epsilon = (
        f"All runs together: epsilon {round_up(total.epsilon)} at delta "
        f"{digits_above(total.delta, 3)} ({total.accountant}, "
        f"{total.neighboring_relation})."
    )
    return "\n".join([*map(_describe, report.rows), epsilon, _COUNTING, *report.notes])


def _describe(row: _Row) -> str:
    run = row.run
    again = run.num_begun - run.num_steps
    return (
        f"Run {run.key:.8} in {', '.join(row.directories)}, from {run.first_time} to "
        f"{run.last_time}: {run.num_steps} steps begun"
        f"{f' ({again} times one was repeated)' if again else ''} with noise "
        f"multiplier {digits_below(run.cost.noise_multiplier, 4)}; epsilon "
        f"{round_up(row.guarantee.epsilon)}."
    )
