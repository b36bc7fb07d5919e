"""The command `plan` of `python -m dpmp`: batch size, noise, method and memory."""

import argparse
import dataclasses
import functools
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import dp_accounting

from dpmp import _pictures, _plain_text, _validate
from dpmp.mechanism import DPSGD
from dpmp.planning import _answers, noise_commands
from dpmp.planning._decoder import Decoder
from dpmp.planning._methods import METHODS, Method, Model
from dpmp.planning._plans import (
    Plan,
    compare_batch_sizes,
    compare_noise,
    plan_to_start_from,
)

_RANK, _LENGTH = 8, 512
# The options with positive integers.
_COUNTS = {
    "--steps": "the number of steps, if it is fixed",
    "--batch-size": "the expected batch size, if it is fixed",
    "--parameters": "the number of parameters of a decoder",
    "--trainable": "the number of entries of adapters",
    "--rank": "plan adapters of attention of this rank alone (default: adapters of "
    f"rank {_RANK} if the whole model does not fit)",
    "--length": f"the number of tokens in an example (default: {_LENGTH})",
}


def add_plan_command(commands: Any) -> None:
    """Adds the command to the subparsers of `argparse`."""
    required = "--num-examples 50000 --epsilon 2 --delta 1e-6"
    model = "--config config.json --length 1024 --memory 24"
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="Chooses batch size, noise, method and microbatch, before any training.",
        description="Compares batch sizes. For a model, it also chooses the first "
        "method that fits into the memory of a device: all parameters, or LoRA.",
        epilog=f"python -m dpmp plan {required} {model}",
    )
    noise_commands.add_options(parser, required.split(), takes_run=False)
    add = functools.partial(parser.add_argument, metavar="X")
    text = "how often each example is used on average (default: 10)"
    add("--epochs", type=float, default=10, help=text)
    for name, text in _COUNTS.items():
        parser.add_argument(name, type=_count, metavar="N", help=text)
    text = "the examples in all batches, for --epochs"
    add("--num-processed", "--processed", type=float, help=text)
    text = "the config.json of a Llama, Qwen, Mistral, Gemma or GPT-2"
    add("--config", type=pathlib.Path, help=text)
    text = "the gigabytes that jax takes of a device: 18 of 24, say"
    add("--memory", type=float, help=text)
    text = "40examples, 5000tokens or 2e14flops a second"
    add("--rate", type=_rate, help=text)
    add("--output", type=pathlib.Path, help="a file for a picture of the noise")
    parser.set_defaults(command=_run)


def _count(text: str) -> int:
    """A positive integer, which may be written as 8e9."""
    try:
        return _validate.positive_integer(number=noise_commands.integer(text))
    except (ValueError, OverflowError):
        message = f"{text} must be a number of at least 1, whole, such as 1e9"
        raise argparse.ArgumentTypeError(message) from None


def _rate(text: str) -> tuple[float, str]:
    found = re.fullmatch(r"([\d.]+(?:e\+?\d+)?)(examples|tokens|flops)", text)
    if found is None or not float(found[1]):
        message = f"{text} must be a number with its unit, such as 40examples"
        raise argparse.ArgumentTypeError(message)
    return float(found[1]), found[2]


def _run(args: argparse.Namespace) -> int:
    result: dict[str, Any] = {}
    for paragraph in _report(args, result):
        if not args.json:
            sys.stdout.write(f"{paragraph}\n\n")
            sys.stdout.flush()  # the next one may take a while
    if args.json:
        sys.stdout.write(json.dumps(result) + "\n")
    return 0


def _report(args: argparse.Namespace, result: dict[str, Any]) -> Iterator[str]:
    """Yields paragraphs as soon as they are known, and puts figures into `result`."""
    model = _model(args)
    length = None if args.length == _LENGTH else args.length
    given = {"memory": args.memory, "rank": args.rank, "length": length}
    if args.rate and args.rate[1] != "examples":  # of which hours follow at once
        given["rate"] = "{:g}{}".format(*args.rate)
    unused = {name: x for name, x in given.items() if x is not None}
    if model is None and unused:
        _validate.fail(
            "what is asked about a model must come with it. Add --parameters or "
            "--config, or leave these out.",
            **unused,
        )
    if args.output and not args.output.parent.is_dir():
        _validate.fail(
            "the picture must be written to a directory that exists. Make it first.",
            output=str(args.output),
        )
    if model is not None:
        fix = "For a GPU with 24 GB pass --memory 18, which jax takes by default."
        _validate.positive(memory=args.memory, fix=fix)
        if args.neighboring_relation == "ADD_OR_REMOVE_ONE":
            _validate.fail(
                "a plan for a model must have neighbours for which book-keeping has a "
                "proof. Leave the model out, and use dpmp.memory.estimate_memory.",
                neighboring_relation=args.neighboring_relation,
            )
        yield _answers.about(model)
    yield f"Comparing batch sizes for epsilon {args.epsilon:g} at delta {args.delta:g}:"
    processed = args.num_processed
    if processed is None:
        processed = args.epochs * args.num_examples
    if args.steps and args.batch_size:
        processed = args.steps * args.batch_size
    relation = dp_accounting.NeighboringRelation[args.neighboring_relation]
    data = {"num_examples": args.num_examples, "neighboring_relation": relation}
    target = {"epsilon": args.epsilon, "delta": args.delta}
    calibrate = functools.partial(
        compare_batch_sizes, num_processed=processed, **data, **target
    )
    plans = calibrate()
    start = plan_to_start_from(plans)
    if is_fixed := bool(args.steps or args.batch_size):
        size = args.batch_size or processed / args.steps
        if not 1 <= size <= args.num_examples:
            _validate.fail(
                "a batch must have at least one and at most all of the examples. "
                "Change --batch-size, --steps or --epochs; of two of them, the third "
                "follows.",
                batch_size=args.batch_size,
                steps=args.steps,
                num_examples=args.num_examples,
                num_processed=processed,
            )
        (start,) = calibrate(sizes=[max(1, round(size))])
        plans = sorted({*plans, start}, key=lambda plan: plan.batch_size)
    result["plans"] = [_as_json(plan, start) for plan in plans]
    yield _answers.table_of_plans(plans, start, is_fixed=is_fixed)
    size, steps = start.batch_size, start.iterations
    run = DPSGD(expected_batch_size=size, iterations=steps, l2_clip_norm=1.0, **data)
    choices = compare_noise(run, **target)
    result["noise"] = [
        {
            "name": x.name,
            "noise_multiplier": x.mechanism.noise_multiplier,
            "error": x.error,
            "bytes_per_parameter": x.bytes_per_parameter,
        }
        for x in choices
    ]
    yield _answers.less_noise(choices)
    if args.output:
        _pictures.save(lambda: _answers.draw(plans, start), args.output)
        yield f"{args.output} shows the noise."
    if model is not None:
        yield _plain_text.paragraph(_answers.COMPILING)
        yield from _report_of_model(model, args, start, calibrate, result)
        return
    fields = {}
    if args.trainable:
        fields = {"num_parameters": args.trainable}
        (start,) = calibrate(sizes=[start.batch_size], **fields)
        yield _answers.noise(start, args.trainable)
    if args.rate:
        yield _answers.hours(start.batch_size * start.iterations, args.rate[0])
    yield _answers.program(args, start, **fields)
    yield _answers.not_planned(start)


def _model(args: argparse.Namespace) -> Model | None:
    if args.config:
        decoder = Decoder.from_config(args.config)
    elif args.parameters:
        decoder = Decoder.of_size(args.parameters)
    else:
        return None
    per_rank = decoder.num_adapted(1)
    rank = args.rank or max(1, round((args.trainable or _RANK * per_rank) / per_rank))
    entries = args.trainable or rank * per_rank
    return Model(decoder, args.length or _LENGTH, rank, entries)


def _report_of_model(
    model: Model,
    args: argparse.Namespace,
    start: Plan,
    calibrate: Callable[..., list[Plan]],
    result: dict[str, Any],
) -> Iterator[str]:
    """The first method that fits, and its needs; what to change if none fits."""
    is_too_noisy = start.is_too_noisy(model.decoder.num_parameters)
    only_lora = args.trainable or args.rank or is_too_noisy
    methods = [x for x in METHODS if x.is_lora or not only_lora]
    tried = list(_tried(model, methods, start.batch_size, 1e9 * args.memory))
    yield _answers.table_of_methods(model, start, tried)
    method, size, memory = tried[-1]
    trained = model.num_trained(method)
    # The resolution of the noise depends on the number of entries.
    (start,) = calibrate(sizes=[start.batch_size], num_parameters=trained)
    yield _answers.noise(start, trained, model)
    verdict = f'"{method.name}" fits, with microbatches of {size}. Memory of a step:'
    verdict = verdict if size else "Nothing fits. The last one needs at least:"
    yield f"{verdict}\n\n{_answers.table_of_memory(memory)}"
    result |= {
        "method": method.name,
        "trained": trained,
        "microbatch_size": size,
        "start": _as_json(start, start),
        "noise_norm": start.noise_norm(trained),
        "memory": {line.name: line.num_bytes for line in memory.at_peak},
        "total_memory": memory.total,
    }
    if not size or (method.is_lora and method != methods[0]):
        saving = dataclasses.replace(model, remat=True)
        *_, other = _tried(saving, methods, start.batch_size, 1e9 * args.memory)
        result["with_checkpoints"] = other[0].name if other[1] else None
        if other[:2] != (method, size) or not size:
            yield _answers.advice(*other)
    if size:
        fields = {"microbatch_size": size, "num_parameters": trained}
        yield _answers.program(args, start, method, model.rank, **fields)
        yield _answers.running_time(model, method, start, args.rate)
        yield _answers.not_planned(start)


def _tried(
    model: Model, methods: Sequence[Method], batch_size: int, num_bytes: float
) -> Iterator[_answers.Tried]:
    """Yields methods up to the first one for which a microbatch fits."""
    for method in methods:
        size, memory = model.fitting(method, batch_size, num_bytes)
        yield method, size, memory
        if size:
            break


def _as_json(plan: Plan, start: Plan) -> dict[str, Any]:
    return dataclasses.asdict(plan) | {
        "noise_in_mean": plan.noise_in_mean,
        "signal_over_noise": plan.signal_over_noise,
        "start_here": plan == start,
    }
