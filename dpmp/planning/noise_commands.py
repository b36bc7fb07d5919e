"""The commands `epsilon`, `calibrate` and `statement` of `python -m dpmp`.

Options are named as the arguments of `DPSGD`. So the errors and statements of the
library also tell users of the command line what to do.
"""

import argparse
import dataclasses
import functools
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import dp_accounting

from dpmp.accounting import DEFAULT_RELATION, digits_above, round_up
from dpmp.mechanism import DPSGD

_Result = tuple[str, dict[str, Any]]  # the text, and the content for --json


def integer(text: str) -> int:
    """An integer, as "1000000" or "1e6"."""
    if text.lstrip("+-").isdecimal():
        return int(text)  # a float has 53 bits
    number = float(text)
    if not number.is_integer():
        raise ValueError
    return int(number)


_RELATIONS = {
    "REPLACE_SPECIAL": "one example is replaced by padding (zero-out)",
    "REPLACE_ONE": "one example is replaced by another",
    "ADD_OR_REMOVE_ONE": "one example more or less",
}

# Flags with types and help texts. The first flag is named as the library's argument.
_REQUIRED: dict[str, tuple[Callable[[str], Any], str]] = {
    "--num-examples": (integer, "the number of examples in the dataset"),
    "--expected-batch-size --batch-size": (float, "the expected size of a batch"),
    "--iterations --steps": (integer, "the number of steps of the whole run"),
    "--noise-multiplier": (float, "the standard deviation of the noise, in clip norms"),
    "--epsilon": (float, "the privacy target"),
    "--delta": (float, "well below 1 over the number of examples"),
}
_OPTIONAL: dict[str, tuple[type, str]] = {
    "--sampling-prob": (
        float,
        "the probability that an example is in a batch (default: the expected batch "
        "size over the number of examples)",
    ),
    "--truncated-batch-size": (
        int,
        "the largest size of a batch (default: one that is hardly ever reached)",
    ),
    "--l2-clip-norm --clip-norm": (float, "default: 1"),
    "--method": (str, "per_example or book_keeping (default: as DPSGD chooses)"),
}


def add_planning_commands(commands: Any) -> None:
    """Adds the three commands to the subparsers of `argparse`."""
    run = "--num-examples 60000 --batch-size 256 --steps 2340 --delta 1e-6"
    for command, example in (
        (_epsilon, f"{run} --noise-multiplier 1.1"),
        (_calibrate, f"{run} --epsilon 3"),
        (_statement, f"{run} --epsilon 3"),
    ):
        name, summary = command.__name__.removeprefix("_"), command.__doc__
        example_line = f"python -m dpmp {name} {example}"
        parser = commands.add_parser(
            name, help=summary, description=summary, epilog=example_line
        )
        add_options(parser, example.split())
        parser.set_defaults(command=functools.partial(_run, command))


def add_options(
    parser: argparse.ArgumentParser, required: Sequence[str], *, takes_run: bool = True
) -> None:
    """Adds the options of the example, which are required, and optional ones."""
    add = parser.add_argument
    for flags, (kind, text) in _REQUIRED.items():
        if flags.split()[-1] in required:
            add(*flags.split(), type=kind, required=True, help=text, metavar="X")
    optional: dict[str, Any] = {"default": argparse.SUPPRESS, "metavar": "X"}
    for flags, (kind, text) in _OPTIONAL.items() if takes_run else ():
        add(*flags.split(), type=kind, help=text, **optional)
    meanings = "; ".join(f"{x}: {meaning}" for x, meaning in _RELATIONS.items())
    add(
        "--neighboring-relation",
        "--neighbors",
        type=str.upper,
        choices=_RELATIONS,
        default=DEFAULT_RELATION.name,
        metavar="NAME",
        help=f"how neighbouring datasets differ. {meanings} (default: %(default)s)",
    )
    add("--json", action="store_true", help="print JSON instead of text")


def _run(
    command: Callable[[argparse.Namespace, DPSGD], _Result], args: argparse.Namespace
) -> int:
    relation = dp_accounting.NeighboringRelation[args.neighboring_relation]
    args.neighboring_relation = relation
    names = {x.name for x in dataclasses.fields(DPSGD)}
    fields = {name: x for name, x in vars(args).items() if name in names}
    mechanism = DPSGD(**{"l2_clip_norm": 1.0, **fields})
    if "epsilon" in args:
        mechanism = mechanism.calibrate(epsilon=args.epsilon, delta=args.delta)
    text, result = command(args, mechanism)
    sys.stdout.write((json.dumps(result) if args.json else text) + "\n")
    return 0


def _epsilon(args: argparse.Namespace, mechanism: DPSGD) -> _Result:
    """Computes epsilon for a noise multiplier."""
    epsilon = mechanism.guarantee().epsilon
    text = f"epsilon {round_up(epsilon)} at delta {args.delta}"
    if args.delta >= 1 / args.num_examples:
        text += ", which allows that one of the examples is published: use less"
    if math.isinf(epsilon):
        text += f"\n{mechanism.statement()}"
    finite = epsilon if math.isfinite(epsilon) else None  # JSON has no infinity
    return text, {"epsilon": finite, "delta": args.delta}


def _calibrate(args: argparse.Namespace, mechanism: DPSGD) -> _Result:
    """Finds the least noise multiplier for an epsilon."""
    noise_multiplier = digits_above(mechanism.noise_multiplier or 0.0, 5)
    text = (
        f"noise multiplier {noise_multiplier}, for epsilon {args.epsilon} at delta "
        f"{args.delta}"
    )
    return text, _guarantee(mechanism)


def _statement(args: argparse.Namespace, mechanism: DPSGD) -> _Result:
    """Says in words what a run guarantees."""
    del args
    text = mechanism.statement()
    return text, {"statement": text, **_guarantee(mechanism)}


def _guarantee(mechanism: DPSGD) -> dict[str, Any]:
    return {
        "epsilon": mechanism.guarantee().epsilon,
        "delta": mechanism.delta,
        "noise_multiplier": mechanism.noise_multiplier,
    }
