"""The command `ledger` of `python -m dpmp`: adds up the epsilon of directories."""

import argparse
import functools
import json
import math
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from dpmp import _validate
from dpmp.accounting import PrivacyGuarantee, digits_above, digits_below, round_up
from dpmp.runs import Ledger, Spent, ledger_of

_COUNTING = (
    "Every step that was released counts, and every step that an error may have told "
    "something about. All directories add up, as if they used the data of the same "
    "people."
)
_REMARKS = {
    "charged_alone": "{} of the steps are paid for without a checkpoint in this "
    "directory: the steps before a state that a program brought along, or those of a "
    "run that ended with an error or before its checkpoint was in place.",
    "made_again": "{} of the steps have the number of another step and count as well: "
    "they were made again, or belong to another run.",
    "incomplete_bytes": "The file ends with an incomplete record of {} bytes, whose "
    "steps are free. The next run removes it.",
}


def add_ledger_command(commands: Any) -> None:
    """Adds the command to the subparsers of `argparse`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "ledger",
        help="Adds up the epsilon of all runs in directories.",
        description="Reads the privacy ledgers of directories, without changing them, "
        "and computes the epsilon of every step that was paid for.",
        epilog="python -m dpmp ledger runs/first runs/second --delta 1e-6",
    )
    add, text = parser.add_argument, "runs in several directories are composed"
    add("directories", nargs="+", type=pathlib.Path, metavar="DIR", help=text)
    add("--delta", type=float, metavar="X", help="default: the delta of the runs")
    add("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(command=_ledger)


def _ledger(args: argparse.Namespace) -> int:
    ledgers = {str(x): read_ledger(x) for x in args.directories}
    report = summary_of(ledgers, args.delta)
    text = json.dumps(report) if args.json else _as_text(report)
    sys.stdout.write(f"{text}\n")
    return 0


def total_of(ledgers: Mapping[str, Ledger]) -> Spent:
    """All steps of ledgers of the same people."""
    return functools.reduce(Spent.beside, (x.spent for x in ledgers.values()))


def summary_of(ledgers: Mapping[str, Ledger], delta: float | None) -> dict[str, Any]:
    """What the steps of ledgers cost together, and each alone, for JSON."""
    total = total_of(ledgers)
    delta = _common_delta(ledgers) if delta is None else delta
    together = total.guarantee(delta=delta)
    return {
        "epsilon": _finite(together),
        "epsilon_if_planned": _finite(total.guarantee_if_planned(delta=delta)),
        "delta": delta,
        "accountant": together.accountant,
        "neighboring_relation": together.neighboring_relation,
        "directories": [_row(x, y, delta) for x, y in ledgers.items()],
    }


def _row(directory: str, ledger: Ledger, delta: float) -> dict[str, Any]:
    spent, times = ledger.spent, [x.time for x in ledger.records]
    released = Spent.of(x.segment for x in ledger.records if x.event == "released")
    costs = dict.fromkeys(x.cost for x in spent.segments)
    different = {step for x in spent.segments for step in range(x.start, x.stop)}
    num_steps = sum(spent.count(x) for x in costs)
    return {
        "directory": directory,
        "first_time": min(times, default=None),
        "last_time": max(times, default=None),
        "steps": [
            {
                "noise_multiplier": x.noise_multiplier,
                "sampling_prob": x.sampling_prob,
                "sampling": x.sampling,
                "cycle_length": x.cycle_length,
                "number": spent.count(x),
            }
            for x in costs
        ],
        "charged_alone": num_steps - sum(released.count(x) for x in costs),
        "made_again": num_steps - len(different),
        "epsilon": _finite(spent.guarantee(delta=delta)),
        "incomplete_bytes": ledger.incomplete_bytes,
    }


def read_ledger(directory: pathlib.Path) -> Ledger:
    """The ledger of a directory; ValueError if it has none."""
    reason = "there is none; before its first release a run has none, and has no cost"
    try:
        ledger = ledger_of(directory)
        if ledger.exists:
            return ledger
    except OSError as error:
        reason = error.strerror or str(error)
    if not directory.is_dir():
        reason = "there is no such directory"
    _validate.fail(
        "every directory must have a ledger that can be read. Pass the directories "
        "that runs were started with.",
        directory=str(directory),
        reason=reason,
    )


def _common_delta(ledgers: Mapping[str, Ledger]) -> float:
    records = [x for ledger in ledgers.values() for x in ledger.records]
    deltas = {x.delta for x in records if x.delta is not None}
    if len(deltas) != 1:
        _validate.fail(
            "all runs must have one delta, or a delta must be given. Pass --delta, "
            "well below 1 over the number of examples.",
            deltas=sorted(deltas),
        )
    return deltas.pop()


def _finite(x: PrivacyGuarantee) -> float | None:
    return x.epsilon if math.isfinite(x.epsilon) else None  # JSON has no infinity


def _as_text(report: dict[str, Any]) -> str:
    total, if_planned = report["epsilon"], report["epsilon_if_planned"]
    delta, relation = report["delta"], report["neighboring_relation"]
    together = (
        f"Together: epsilon {digits_of(total)} at delta {digits_above(delta, 3)} "
        f"({report['accountant']}, {relation})."
    )
    lines = [*map(_describe, report["directories"]), together]
    if total != if_planned:
        lines.append(
            "Each noise multiplier and batch size counts with all planned steps. If "
            "all of these and the numbers of steps were fixed before the first step: "
            f"epsilon {digits_of(if_planned)}."
        )
    return "\n".join([*lines, _COUNTING])


def describe_steps(row: Mapping[str, Any]) -> str:
    """The steps of a directory, by their cost."""
    steps = []
    for x in row["steps"]:
        how = " by random allocation" if x["sampling"] == "random_allocation" else ""
        if x["cycle_length"] > 1:
            how += f" of one of {x['cycle_length']} groups"
        steps.append(
            f"{x['number']} steps with noise multiplier "
            f"{digits_below(x['noise_multiplier'], 4)} and sampling probability "
            f"{digits_above(x['sampling_prob'], 4)}{how}"
        )
    return " and ".join(steps) or "no steps"


def _describe(row: dict[str, Any]) -> str:
    first = (
        f"{row['directory']}, from {row['first_time']} to {row['last_time']}: "
        f"{describe_steps(row)}; epsilon {digits_of(row['epsilon'])}."
    )
    remarks = (text.format(row[name]) for name, text in _REMARKS.items() if row[name])
    return " ".join([first, *remarks])


def digits_of(epsilon: float | None) -> str:
    """An epsilon of a summary, rounded up; None stands for an infinite one."""
    return round_up(math.inf if epsilon is None else epsilon)
