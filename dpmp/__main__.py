"""The command line: `python -m dpmp`."""

import argparse
import sys
from collections.abc import Sequence

from dpmp import _validate
from dpmp.planning import noise_commands, plan_command
from dpmp.tools import audit, devices, ledger, plot, report
from dpmp.tools.selfcheck import command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m dpmp", description="Tools for differentially private training."
    )
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(
        title="commands", metavar="command", dest="command_name"
    )
    command.add_selfcheck_command(commands)
    audit.add_audit_command(commands)
    devices.add_devices_command(commands)
    noise_commands.add_planning_commands(commands)
    plan_command.add_plan_command(commands)
    ledger.add_ledger_command(commands)
    report.add_report_command(commands)
    plot.add_plot_command(commands)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        return args.command(args)
    except _validate.RefusedError as error:
        commands.choices[args.command_name].error(str(error))


if __name__ == "__main__":
    sys.exit(main())
