"""The command `selfcheck`: checks the promises that dpmp makes about its arithmetic.

A compiler, a device or a library may behave unexpectedly. So the promises are measured,
on synthetic data.
"""

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

import rich.console

from dpmp import _plain_text
from dpmp.tools import checks
from dpmp.tools.selfcheck._noise import measure_keys, measure_noise
from dpmp.tools.selfcheck._subjects import Result, Sizes, Subjects, dpmp_subjects
from dpmp.tools.selfcheck._sums import measure_contributions, measure_sensitivity


def add_selfcheck_command(commands: Any) -> None:
    """Adds the command to the subparsers of `argparse`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "selfcheck",
        help="Checks on this machine what dpmp promises of its arithmetic.",
        description="Measures on the first device of this machine whether dpmp keeps "
        "its promises about clipping, sums, noise and keys. This takes about a "
        "minute. The exit status is 1 if a promise does not hold.",
    )
    add = parser.add_argument
    text = "also measure float noise, which fails; the exit status stays the same"
    add("--include-unsafe", action="store_true", help=text)
    text = "four times as many noisy sums, eight times as many leaves, in a few minutes"
    add("--thorough", action="store_true", help=text)
    checks.add_json_option(parser)
    parser.set_defaults(command=_selfcheck)


def _selfcheck(args: argparse.Namespace) -> int:
    thorough = {"num_leaves": 1024, "num_training": 2**25, "num_test": 2**22}
    sizes = Sizes(**thorough) if args.thorough else Sizes()
    subjects = dpmp_subjects(include_unsafe=args.include_unsafe)
    results = run(subjects, sizes, rich.console.Console())
    if args.json is not None:
        checks.write(args.json, [x._asdict() for x in results])
    return 1 if broken_claims(results) else 0


def run(
    subjects: Subjects, sizes: Sizes, console: rich.console.Console
) -> list[Result]:
    """Measures all subjects, and prints each result as soon as it is known."""

    def show(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    versions = map(" ".join, checks.versions().items())
    show(f"{checks.device()}; {', '.join(versions)}; this takes about a minute")
    results = []
    with console.status("measuring"):
        for part in parts(subjects, sizes):
            for measurement in dict.fromkeys(x.measurement for x in part):
                show(f"\n{measurement}")
                show(_table([x for x in part if x.measurement == measurement]))
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


def _table(results: list[Result]) -> str:
    rows = [["", "measured", "allowed", "", "where"]]
    for x in results:
        lower = "" if x.at_least is None else f"{x.at_least:.3g} <= "
        upper = "" if x.at_most is None else f" <= {x.at_most:.3g}"
        verdict = "ok" if x.passed else "FAIL" if x.is_claimed else "fails"
        name = x.subject if x.is_claimed else f"{x.subject} (no claim)"
        rows.append([name, f"{x.value:.9g}", f"{lower}x{upper}", verdict, x.worst_case])
    return _plain_text.table(rows, "<><<<")
