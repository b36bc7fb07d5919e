"""The commands `epsilon`, `calibrate`, `statement` and `plan` of `python -m dpmp`."""

import argparse
import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import dp_accounting
import rich.console
import rich.table

from dpmp import _validate
from dpmp.accounting import DEFAULT_RELATION, round_up
from dpmp.accounting._rounding import digits_above
from dpmp.mechanism import DPSGD
from dpmp.planning._plans import Plan, compare_batch_sizes, plan_to_start_from

_RELATIONS = {
    "zero-out": dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
    "replace-one": dp_accounting.NeighboringRelation.REPLACE_ONE,
    "add-or-remove-one": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
}


def add_planning_commands(commands: Any) -> None:
    """Adds the four commands to the subparsers of `argparse`."""
    _add(
        commands,
        "epsilon",
        _epsilon,
        ["num-examples", "batch-size", "steps", "noise-multiplier", "delta"],
        "compute epsilon for a noise multiplier",
        "python -m dpmp epsilon --num-examples 60000 --batch-size 256 --steps 2340 "
        "--noise-multiplier 1.1 --delta 1e-6",
    )
    _add(
        commands,
        "calibrate",
        _calibrate,
        ["num-examples", "batch-size", "steps", "epsilon", "delta"],
        "find the least noise multiplier for an epsilon",
        "python -m dpmp calibrate --num-examples 60000 --batch-size 256 --steps 2340 "
        "--epsilon 3 --delta 1e-6",
    )
    parser = _add(
        commands,
        "statement",
        _statement,
        ["num-examples", "batch-size", "steps", "epsilon", "delta"],
        "say in words what a run guarantees",
        "python -m dpmp statement --num-examples 60000 --batch-size 256 --steps 2340 "
        "--epsilon 3 --delta 1e-6",
    )
    parser.add_argument(
        "--clip-norm", type=float, default=1.0, metavar="X", help="default: 1"
    )
    methods = ["per_example", "book_keeping"]
    parser.add_argument("--method", choices=methods, default=methods[0])
    _add(
        commands,
        "plan",
        _plan,
        ["num-examples", "epsilon", "delta", "processed"],
        "compare batch sizes for a number of processed examples",
        "python -m dpmp plan --num-examples 60000 --epsilon 3 --delta 1e-6 "
        "--processed 600000",
    )


_FLAGS: dict[str, tuple[Callable[[str], Any], str]] = {
    "num-examples": (int, "the number of examples in the dataset"),
    "batch-size": (float, "the expected number of examples in a batch"),
    "steps": (int, "the number of steps of the whole run"),
    "noise-multiplier": (float, "the standard deviation of the noise, in clip norms"),
    "epsilon": (float, "the privacy target"),
    "delta": (float, "well below 1 over the number of examples"),
    "processed": (float, "the number of examples in all batches together"),
}


_OPTIONAL_FLAGS: dict[str, tuple[Callable[[str], Any], str]] = {
    "sampling-prob": (
        float,
        "the probability that an example is in a batch (default: the batch size over "
        "the number of examples)",
    ),
    "truncated-batch-size": (
        int,
        "the largest size of a batch (default: one that is hardly ever reached)",
    ),
}


def _add(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], dict[str, Any]],
    flags: Sequence[str],
    summary: str,
    example: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=summary.capitalize() + ".", epilog=example
    )
    for flag in flags:
        kind, text = _FLAGS[flag]
        parser.add_argument(
            f"--{flag}", type=kind, required=True, help=text, metavar="X"
        )
    parser.add_argument(
        "--neighbors",
        choices=list(_RELATIONS),
        default=next(k for k, v in _RELATIONS.items() if v == DEFAULT_RELATION),
        help="what neighbouring datasets differ in (default: %(default)s)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead of text"
    )

    if "batch-size" in flags:
        for flag, (kind, text) in _OPTIONAL_FLAGS.items():
            parser.add_argument(f"--{flag}", type=kind, help=text, metavar="X")

    def command(args: argparse.Namespace) -> int:
        try:
            result = run(args)
        except _validate.RefusedError as error:
            raise _validate.RefusedError(_in_flags(str(error))) from None
        text = result.pop("text")
        if args.json:
            sys.stdout.write(json.dumps(result) + "\n")
        else:
            rich.console.Console(soft_wrap=True, highlight=False).print(text)
        return 0

    parser.set_defaults(command=command)
    return parser


# What the options of `DPSGD` are called on the command line.
_FLAGS_OF_OPTIONS = {
    "num_examples": "--num-examples",
    "expected_batch_size": "--batch-size",
    "iterations": "--steps",
    "noise_multiplier": "--noise-multiplier",
    "num_processed": "--processed",
    "sampling_prob": "--sampling-prob",
    "truncated_batch_size": "--truncated-batch-size",
    "l2_clip_norm": "--clip-norm",
    "neighboring_relation": "--neighbors",
    'method="per_example"': "--method per_example",
    **{relation.name: f"--neighbors {name}" for name, relation in _RELATIONS.items()},
}


def _in_flags(text: str) -> str:
    """The same text, with the flags of the command line for options of Python."""
    for name, relation in _RELATIONS.items():
        text = text.replace(repr(relation.name), name)
    for name, flag in _FLAGS_OF_OPTIONS.items():
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?!\w)", flag, text)
    return text


def _mechanism(args: argparse.Namespace, **fields: Any) -> DPSGD:
    mechanism = DPSGD(
        num_examples=args.num_examples,
        expected_batch_size=args.batch_size,
        iterations=args.steps,
        sampling_prob=args.sampling_prob,
        truncated_batch_size=args.truncated_batch_size,
        neighboring_relation=_RELATIONS[args.neighbors],
        **{"l2_clip_norm": 1.0, **fields},
    )
    if "epsilon" in args:
        return mechanism.calibrate(epsilon=args.epsilon, delta=args.delta)
    noise = {"noise_multiplier": args.noise_multiplier, "delta": args.delta}
    return dataclasses.replace(mechanism, **noise)


def _epsilon(args: argparse.Namespace) -> dict[str, Any]:
    guarantee = _mechanism(args).guarantee()
    epsilon = guarantee.epsilon
    finite = epsilon if math.isfinite(epsilon) else None  # JSON has no infinity
    text = f"epsilon {round_up(epsilon)} at delta {args.delta}"
    return {"epsilon": finite, "delta": args.delta, "text": text}


def _calibrate(args: argparse.Namespace) -> dict[str, Any]:
    mechanism = _mechanism(args)
    noise_multiplier = mechanism.noise_multiplier or 0.0
    text = (
        f"noise multiplier {digits_above(noise_multiplier, 5)}, for epsilon "
        f"{args.epsilon} at delta {args.delta}"
    )
    return {
        "noise_multiplier": noise_multiplier,
        "epsilon": mechanism.guarantee().epsilon,
        "delta": args.delta,
        "text": text,
    }


def _statement(args: argparse.Namespace) -> dict[str, Any]:
    mechanism = _mechanism(args, l2_clip_norm=args.clip_norm, method=args.method)
    text = _in_flags(mechanism.statement())
    return {
        "statement": text,
        "epsilon": mechanism.guarantee().epsilon,
        "delta": args.delta,
        "noise_multiplier": mechanism.noise_multiplier,
        "text": text,
    }


def _plan(args: argparse.Namespace) -> dict[str, Any]:
    plans = compare_batch_sizes(
        num_examples=args.num_examples,
        epsilon=args.epsilon,
        delta=args.delta,
        num_processed=args.processed,
        neighboring_relation=_RELATIONS[args.neighbors],
    )
    start = plan_to_start_from(plans)
    rows = [
        {
            **dataclasses.asdict(plan),
            "noise_in_mean": plan.noise_in_mean,
            "signal_over_noise": plan.signal_over_noise,
            "start_here": plan == start,
        }
        for plan in plans
    ]
    return {"plans": rows, "text": _as_table(plans, start)}


def _as_table(plans: Sequence[Plan], start: Plan) -> rich.console.RenderableType:
    table = rich.table.Table(box=None)
    header = ["batch size", "steps", "noise multiplier", "noise in the mean gradient"]
    for title in [*header, "signal over noise", ""]:
        table.add_column(title, justify="right")
    for plan in plans:
        table.add_row(
            str(plan.batch_size),
            str(plan.iterations),
            digits_above(plan.noise_multiplier, 4),
            f"{plan.noise_in_mean:.2g}",
            f"{plan.signal_over_noise:.0f}",
            "<- start here" if plan == start else "",
        )
    reason = (
        "Noise in the mean gradient is in clip norms. Signal over noise is that of the "
        "sum of all steps, for gradients of one clip norm. The row to start from has "
        "the most steps, of those within 25 % of the best signal over noise."
    )
    return rich.console.Group(table, "", reason)
