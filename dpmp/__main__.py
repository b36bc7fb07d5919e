"""The command line: `python -m dpmp`."""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import rich.console

from dpmp import _validate
from dpmp.planning import _commands
from dpmp.tools import devices, ledger, memory, plot
from dpmp.tools.selfcheck import _command
from dpmp.tools.selfcheck._modes import dpmp_subjects
from dpmp.tools.selfcheck._results import Sizes


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m dpmp", description="Tools for differentially private training."
    )
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(
        title="commands", metavar="command", dest="command_name"
    )
    _add_selfcheck(commands)
    devices.add_devices_command(commands)
    memory.add_memory_command(commands)
    _commands.add_planning_commands(commands)
    ledger.add_ledger_command(commands)
    plot.add_plot_command(commands)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        return args.command(args)
    except _validate.RefusedError as error:
        commands.choices[args.command_name].error(str(error))


def _add_selfcheck(commands: Any) -> None:
    parser = commands.add_parser(
        "selfcheck",
        help="check on this machine what dpmp promises of its arithmetic",
        description=(
            "Measures on the first device of this machine whether dpmp keeps its "
            "promises about clipping, sums, noise and keys. This takes a minute or "
            "two. The exit status is 1 if a promise does not hold."
        ),
    )
    parser.add_argument(
        "--include-unsafe",
        action="store_true",
        help="also measure float noise, which fails; the exit status stays the same",
    )
    parser.add_argument(
        "--thorough",
        action="store_true",
        help="draw four times as many noisy sums; this takes several minutes",
    )
    parser.add_argument(
        "--json", type=_new_file, metavar="FILE", help="also write the results to FILE"
    )
    parser.set_defaults(command=_selfcheck)


def _new_file(name: str) -> pathlib.Path:
    path = pathlib.Path(name)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {path.parent}")
    return path


def _selfcheck(args: argparse.Namespace) -> int:
    sizes = Sizes(num_training=2**25, num_test=2**22) if args.thorough else Sizes()
    subjects = dpmp_subjects(include_unsafe=args.include_unsafe)
    results = _command.run(subjects, sizes, rich.console.Console())
    if args.json is not None:
        _command.write_json(args.json, results)
    return 1 if _command.broken_claims(results) else 0


if __name__ == "__main__":
    sys.exit(main())
