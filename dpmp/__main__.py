"""The command line: `python -m dpmp`."""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import rich.console

from dpmp.planning import _commands
from dpmp.tools import devices, memory
from dpmp.tools.selfcheck import _command
from dpmp.tools.selfcheck._modes import dpmp_subjects
from dpmp.tools.selfcheck._results import Sizes


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m dpmp", description="Tools for private training."
    )
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="command")
    _add_selfcheck(commands)
    devices.add_devices_command(commands)
    memory.add_memory_command(commands)
    _commands.add_planning_commands(commands)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    return args.command(args)


def _add_selfcheck(commands: Any) -> None:
    parser = commands.add_parser(
        "selfcheck",
        help="measure what dpmp promises of its arithmetic, on this machine",
        description=(
            "Measures, on this machine and its first device, what dpmp promises of "
            "clipping, sums, noise and keys. It takes a minute or two. The exit status "
            "is 1 if a promise does not hold."
        ),
    )
    parser.add_argument(
        "--include-unsafe",
        action="store_true",
        help="show how float noise fails; this does not change the exit status",
    )
    parser.add_argument(
        "--thorough",
        action="store_true",
        help="four times as many draws; several minutes",
    )
    parser.add_argument(
        "--json", type=_new_file, metavar="FILE", help="also write the results there"
    )
    parser.set_defaults(command=_selfcheck_command)


def _new_file(name: str) -> pathlib.Path:
    path = pathlib.Path(name)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {path.parent}")
    return path


def _selfcheck_command(args: argparse.Namespace) -> int:
    sizes = Sizes()
    if args.thorough:
        sizes = Sizes(num_training=2**25, num_test=2**22)
    subjects = dpmp_subjects(include_unsafe=args.include_unsafe)
    results = _command.run(subjects, sizes, rich.console.Console())
    if args.json is not None:
        _command.write_json(args.json, results)
    return 1 if _command.broken_claims(results) else 0


if __name__ == "__main__":
    sys.exit(main())
