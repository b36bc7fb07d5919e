"""The command `report`: a document about the privacy of a run, for those who approve.

Everything in it follows from the public ledger of the run. It contains nothing that was
computed from the data, except for the hash of the released checkpoint.
"""

import argparse
import json
import math
import pathlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from dpmp import _validate
from dpmp.runs import Ledger, has_files_of
from dpmp.tools import checks
from dpmp.tools.ledger import read_ledger, summary_of, total_of
from dpmp.tools.report_pages import (
    ASSUMED,
    NOT_COVERED,
    as_html,
    as_markdown,
    described_checkpoints,
    headline,
    success,
)

# For the curve, and for the bounds on attacks.
_DELTAS = [
    0.5,
    *(x / 10**k for k in range(1, 4) for x in (4, 2, 1)),
    *(10.0**-k for k in range(4, 11)),
]

_FALSE_POSITIVE_RATES = 0.001, 0.01, 0.1

_UNITS = {
    "REPLACE_SPECIAL": "one example is replaced by padding (zero-out)",
    "ADD_OR_REMOVE_ONE": "one dataset has one example more than the other",
    "REPLACE_ONE": "the content of one example differs",
}


def add_report_command(commands: Any) -> None:
    """Adds the command to the subparsers of `argparse`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "report",
        help="Writes a document about the privacy of runs, for those who approve it.",
        description="Reads the privacy ledgers of directories. Writes privacy.json, "
        "privacy.html (which opens without a network) and privacy.md (a section for a "
        "model card).",
        epilog="python -m dpmp report runs/first --output release",
    )
    add, path = parser.add_argument, pathlib.Path
    text = "of runs on the same people, which add up"
    add("directories", nargs="+", type=path, metavar="DIR", help=text)
    add("--output", type=path, default=path(), metavar="DIR", help="default: here")
    add("--delta", type=float, metavar="X", help="default: the delta of the runs")
    text = "after DIR: JSON of selfcheck or audit (--json), whose results are shown too"
    add("--checks", nargs="*", type=path, default=[], metavar="FILE", help=text)
    text = "what was trained, on what, and what for: a sentence that comes first"
    add("--about", default="", metavar="TEXT", help=text)
    parser.set_defaults(command=_report)


def _report(args: argparse.Namespace) -> int:
    report = report_of(args.directories, args.delta, args.checks, args.about)
    contents = {
        "privacy.json": json.dumps(report, indent=2),
        "privacy.html": as_html(report),
        "privacy.md": as_markdown(report),
    }
    for name, content in contents.items():
        path = args.output / name
        try:
            args.output.mkdir(parents=True, exist_ok=True)
            path.write_text(content + "\n")
        except OSError as error:
            _validate.fail(
                "the report must be written. Pass an --output that can be written to.",
                output=str(path),
                reason=error.strerror,
            )
        sys.stdout.write(f"{path}\n")
    sys.stderr.writelines(
        f"{x}\n" for x in (headline(report), *described_checkpoints(report))
    )
    sys.stdout.writelines(f"{x}\n" for x in report["remarks"])
    return 1 if report["remarks"] else 0


def report_of(
    directories: Sequence[pathlib.Path],
    delta: float | None = None,
    files: Iterable[pathlib.Path] = (),
    about: str = "",
) -> dict[str, Any]:
    """Everything that the documents show, for JSON."""
    # The names alone: the report goes to others.
    paths = {x.absolute().name: x for x in directories}
    if len(paths) != len(directories):
        _validate.fail(
            "directories must have different names, by which the report calls them. "
            "Rename one of them.",
            directories=[x.absolute().name for x in directories],
        )
    ledgers = {name: read_ledger(x) for name, x in paths.items()}
    summary, total = summary_of(ledgers, delta), total_of(ledgers)
    pairs = ((x, total.guarantee(delta=x).epsilon) for x in _DELTAS)
    curve = [(d, e) for d, e in pairs if math.isfinite(e)]
    costs = {repr(x.cost) for x in total.segments}
    report = {
        **summary,
        "protected_unit": "one example",
        "num_examples": {path: _num_examples(x) for path, x in ledgers.items()},
        "neighbours": _UNITS[summary["neighboring_relation"]],
        "curve": [{"delta": d, "epsilon": e} for d, e in curve],
        "attacks": [
            {"false_positive_rate": x, "true_positive_rate_at_most": success(curve, x)}
            for x in _FALSE_POSITIVE_RATES
        ],
        "checkpoints": {x: _checkpoint(paths[x], y) for x, y in ledgers.items()},
        "assumed": ASSUMED,
        "not_covered": NOT_COVERED,
        "checks": [checks.read(x, costs) for x in files],
        "versions": checks.versions(),
    }
    return {"about": " ".join(about.split()), "remarks": _remarks(report), **report}


def _remarks(report: dict[str, Any]) -> list[str]:
    """What an approver must see first."""
    found = []
    if report["epsilon"] is None:
        found.append(
            "NO PRIVACY IS CLAIMED: steps were made without clipping or noise, or with "
            "too little noise for a finite epsilon at this delta."
        )
    failed = [x["file"] for x in report["checks"] if x["passed"] < x["number"]]
    found += [f"A CHECK FAILED, see {x}: the claim may be false." for x in failed]
    found += [
        f"ANOTHER CHECKPOINT: the files after step {x['step']} in {path} are not those "
        "that the ledger released."
        for path, x in report["checkpoints"].items()
        if x and x["files_have_it"] is False
    ]
    sizes = [x for x in report["num_examples"].values() if x is not None]
    if sizes and report["delta"] >= 1 / min(sizes):
        found.append(
            f"DELTA IS TOO LARGE: publishing one of the {min(sizes)} examples, drawn "
            f"at random, would satisfy delta {1 / min(sizes):.2g}. Use a tenth of that "
            "at most."
        )
    return found


def _num_examples(ledger: Ledger) -> int | None:
    """The size of the data; None where it is protected."""
    costs = [x.cost for x in ledger.spent.segments]
    if any(x.neighboring_relation.name == "ADD_OR_REMOVE_ONE" for x in costs):
        return None
    return min((x.num_examples for x in costs), default=None)


def _checkpoint(directory: pathlib.Path, ledger: Ledger) -> dict[str, Any] | None:
    """The newest checkpoint: its step, the hash of its files, and if they have it."""
    released = [x for x in ledger.records if x.event == "released" and x.digest]
    if not released:
        return None
    newest = released[-1]
    return {
        "step": newest.segment.stop,
        "blake2b": newest.digest,
        "files_have_it": has_files_of(directory, newest),
    }
