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
from dpmp.accounting import DEFAULT_RELATION, digits_above
from dpmp.planning import noise_commands
from dpmp.planning._decoder import Decoder
from dpmp.planning._memory_estimate import MemoryEstimate
from dpmp.planning._methods import METHODS, Method, Model
from dpmp.planning._plans import Plan, compare_batch_sizes, plan_to_start_from

_RANK = 8
_REASON = (
    "Noise in the mean gradient is in clip norms. Signal over noise is that of the sum "
    "of all steps, for gradients of one clip norm. The row to start from has the most "
    "steps, of those within 25 % of the best signal over noise. --steps overrules it."
)
_COMPILING = (
    "Counting memory. To measure activations, sums of clipped gradients are compiled "
    "for the shapes of the model, and not run. This takes up to half a minute for each "
    "kind of training."
)
_NOT_ENOUGH = (
    "jax.checkpoint around each layer would not be enough. Use a smaller model, "
    "shorter examples (--length), or several devices (docs/many_devices.md)."
)
_THE_REST = (
    "The guides docs/finetune_llm.md and docs/own_weights.md have the rest of the "
    "program. Gradients have noise in num_parameters entries: change it, or leave it "
    "out, for a model of another size."
)
# The options with positive integers.
_COUNTS: dict[str, tuple[int | None, str]] = {
    "--steps": (None, "the number of steps, if it is fixed"),
    "--parameters": (None, "the number of parameters of a decoder"),
    "--trainable": (None, "the number of entries of adapters"),
    "--rank": (None, f"the rank of adapters of attention (default: {_RANK})"),
    "--length": (512, "the number of tokens in an example (default: 512)"),
}
_OTHERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "--num-processed --processed": (float, "the examples in all batches, for --epochs"),
    "--config": (pathlib.Path, "the config.json of a Llama, Qwen, Gemma or GPT-2"),
    "--memory": (float, "the free memory of a device, in gigabytes"),
    "--rate": (
        lambda text: _rate(text),
        "40examples, 5000tokens or 2e14flops a second",
    ),
    "--output": (pathlib.Path, "a file for a picture of the noise"),
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
    text = "how often each example is used on average (default: 10)"
    parser.add_argument("--epochs", type=float, default=10, metavar="X", help=text)
    for name, (default, text) in _COUNTS.items():
        parser.add_argument(name, type=_count, default=default, metavar="N", help=text)
    for names, (kind, text) in _OTHERS.items():
        parser.add_argument(*names.split(), type=kind, metavar="X", help=text)
    parser.set_defaults(command=_run)


def _count(text: str) -> int:
    """A positive integer, which may be written as 8e9."""
    try:
        return _validate.positive_integer(number=int(float(text)))
    except (ValueError, OverflowError):
        message = f"{text} must be a number of at least 1, such as 1e9"
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
    _validate.require(
        model is not None or args.memory is None,
        "memory must come with a model. Add --parameters or --config, or leave "
        "--memory out.",
        memory=args.memory,
    )
    if model is not None:
        fix = "Pass --memory 24, for example, for a device with 24 GB."
        _validate.positive(memory=args.memory, fix=fix)
        _validate.require(
            args.neighboring_relation != "ADD_OR_REMOVE_ONE",
            "a plan for a model must have neighbours for which book-keeping has a "
            "proof. Leave the model out, and use dpmp.memory.estimate_memory.",
            neighboring_relation=args.neighboring_relation,
        )
        yield _about(model)
    yield f"Comparing batch sizes for epsilon {args.epsilon:g} at delta {args.delta:g}:"
    calibrate = functools.partial(
        compare_batch_sizes,
        num_examples=args.num_examples,
        epsilon=args.epsilon,
        delta=args.delta,
        num_processed=args.num_processed or args.epochs * args.num_examples,
        neighboring_relation=dp_accounting.NeighboringRelation[
            args.neighboring_relation
        ],
    )
    plans = calibrate()
    start = plan_to_start_from(plans)
    if args.steps:
        processed = calibrate.keywords["num_processed"]
        (start,) = calibrate(sizes=[max(1, round(processed / args.steps))])
        plans = sorted({*plans, start}, key=lambda plan: plan.batch_size)
    result["plans"] = [_as_json(plan, start) for plan in plans]
    yield f"{_table_of_plans(plans, start)}\n\n{_plain_text.paragraph(_REASON)}"
    if args.output:
        _pictures.save(lambda: _draw(plans, start), args.output)
        yield f"{args.output} shows the noise."
    if model is not None:
        yield _plain_text.paragraph(_COMPILING)
        yield from _report_of_model(model, args, start, calibrate, result)
        return
    fields = {}
    if args.trainable:
        fields = {"num_parameters": args.trainable}
        (start,) = calibrate(sizes=[start.batch_size], **fields)
        yield _noise(start, args.trainable)
    yield _program(args, start, **fields)


def _model(args: argparse.Namespace) -> Model | None:
    if args.config:
        decoder = Decoder.from_config(args.config)
    elif args.parameters:
        decoder = Decoder.of_size(args.parameters)
    else:
        return None
    per_rank = decoder.num_adapted(1)
    rank = args.rank or max(1, round((args.trainable or _RANK * per_rank) / per_rank))
    return Model(decoder, args.length, rank, args.trainable or rank * per_rank)


def _report_of_model(
    model: Model,
    args: argparse.Namespace,
    start: Plan,
    calibrate: Callable[..., list[Plan]],
    result: dict[str, Any],
) -> Iterator[str]:
    """The first method that fits, and its needs; what to change if none fits."""
    methods = [x for x in METHODS if x.is_lora or not (args.trainable or args.rank)]
    tried = list(_tried(model, methods, start.batch_size, 1e9 * args.memory))
    rows = [["method", "trained", "norm of the noise", "GB", "microbatch"]]
    for method, size, memory in tried:
        trained = model.num_trained(method)
        # What does not fit without activations is not compiled.
        more = "" if "activations" in memory.by_name else "more than "
        needed, norm = f"{more}{memory.total / 1e9:.1f}", start.noise_norm(trained)
        cells = _short(trained), f"{norm:.3g}", needed, str(size or "does not fit")
        rows.append([method.name, *cells])
    yield _plain_text.table(rows, "<>>>>")
    method, size, memory = tried[-1]
    trained = model.num_trained(method)
    # The resolution of the noise depends on the number of entries.
    (start,) = calibrate(sizes=[start.batch_size], num_parameters=trained)
    yield _noise(start, trained, model)
    verdict = f'"{method.name}" fits, with microbatches of {size}. Memory of a step:'
    verdict = verdict if size else "Nothing fits. The last one needs at least:"
    yield f"{verdict}\n\n{_table_of_memory(memory)}"
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
            yield _advice(*other)
    if size:
        fields = {"microbatch_size": size, "num_parameters": trained}
        yield _program(args, start, method, **fields)
        yield _plain_text.paragraph(_THE_REST)
        yield _time(model, method, start, args.rate)


def _tried(
    model: Model, methods: Sequence[Method], batch_size: int, num_bytes: float
) -> Iterator[tuple[Method, int, MemoryEstimate]]:
    """Yields methods with the microbatch that fits (or 0), up to the first with one."""
    for method in methods:
        size, memory = model.fitting(method, batch_size, num_bytes)
        yield method, size, memory
        if size:
            break


def _about(model: Model) -> str:
    decoder = model.decoder
    return _plain_text.paragraph(
        f"The model has {_short(decoder.num_parameters)} parameters: {decoder.layers} "
        f"layers of width {decoder.width}, and {decoder.vocabulary} tokens. LoRA of "
        f"rank {model.rank} trains {_short(model.num_in_adapters)} entries."
    )


def _noise(plan: Plan, trained: int, model: Model | None = None) -> str:
    text = (
        f"The noise in the mean gradient has a norm of {plan.noise_norm(trained):.3g}, "
        f"over {_short(trained)} trained entries. The mean gradient itself has a norm "
        "of at most 1, the clip norm. The norm of the noise grows with the square root "
        "of the number of trained entries, so fewer of them may learn more."
    )
    if model is not None and model.num_in_adapters < trained:
        norm, rank = plan.noise_norm(model.num_in_adapters), model.rank
        text += f" LoRA of rank {rank} would have {norm:.3g}; --rank {rank} plans it."
    return _plain_text.paragraph(text)


def _advice(method: Method, size: int, memory: MemoryEstimate) -> str:
    """What layers that are computed again in the backward pass would change."""
    if not size:
        return _plain_text.paragraph(_NOT_ENOUGH)
    return _plain_text.paragraph(
        "With jax.checkpoint around each layer, every layer is computed twice, and "
        f'"{method.name}" fits, with microbatches of {size} ({memory.total / 1e9:.1f} '
        "GB)."
    )


def _program(
    args: argparse.Namespace, plan: Plan, method: Method | None = None, **more: int
) -> str:
    fields = {
        "num_examples": args.num_examples,
        "expected_batch_size": plan.batch_size,
        "iterations": plan.iterations,
        "l2_clip_norm": 1.0,
        **more,
    }
    if (relation := args.neighboring_relation) != DEFAULT_RELATION.name:
        fields["neighboring_relation"] = f"dp_accounting.NeighboringRelation.{relation}"
    lines = [f"      {name}={value}," for name, value in fields.items()]
    target = f"epsilon={args.epsilon:g}, delta={args.delta:g}"
    lines.append(f"  ).calibrate({target})")
    if method is not None:
        lines.append(f"  policy = {method.policy}")
    if method is not None and method.is_lora:
        lines.append("  loss_fn = lora.apply(loss_fn, base)")
    return "\n".join(["Run this:\n\n  mechanism = dpmp.DPSGD(", *lines])


def _time(
    model: Model, method: Method, plan: Plan, rate: tuple[float, str] | None
) -> str:
    num_examples = plan.batch_size * plan.iterations
    flops = model.num_operations(method, num_examples)
    text = f"The run processes {_short(num_examples)} examples, in {flops:.2g} products"
    text += " and additions. "
    if rate is None:
        text += "For its time, pass --rate with the speed that `fit` shows."
    else:
        done = {"examples": num_examples, "tokens": num_examples * model.length}
        hours = done.get(rate[1], flops) / rate[0] / 3600
        text += f"At this rate it takes {hours:.3g} hours."
    return _plain_text.paragraph(text)


def _as_json(plan: Plan, start: Plan) -> dict[str, Any]:
    return dataclasses.asdict(plan) | {
        "noise_in_mean": plan.noise_in_mean,
        "signal_over_noise": plan.signal_over_noise,
        "start_here": plan == start,
    }


def _table_of_plans(plans: Sequence[Plan], start: Plan) -> str:
    header = ["batch size", "steps", "noise multiplier", "noise in the mean gradient"]
    table = [[*header, "signal over noise", ""]]
    for plan in plans:
        cells = [
            str(plan.batch_size),
            str(plan.iterations),
            digits_above(plan.noise_multiplier, 4),
            f"{plan.noise_in_mean:.2g}",
            f"{plan.signal_over_noise:.0f}",
            "<- start here" if plan == start else "",
        ]
        table.append(cells)
    return _plain_text.table(table, ">>>>><")


def _table_of_memory(memory: MemoryEstimate) -> str:
    rows = [["", "GB", "size"]]
    for line in memory.at_peak:
        rows.append([line.name, f"{line.num_bytes / 1e9:.3f}", line.formula])
    rows.append(["total", f"{memory.total / 1e9:.3f}", f"during {memory.moment}"])
    return _plain_text.table(rows, "<><", indent="  ")


def _draw(plans: Sequence[Plan], start: Plan) -> Any:
    """The noise multiplier, and the noise in the mean, against the batch size."""
    figure = _pictures.new_figure(figsize=(8, 3.4), layout="constrained")
    sizes = [plan.batch_size for plan in plans]
    names = {
        "noise_multiplier": "noise multiplier",
        "noise_in_mean": "noise in the mean gradient",
    }
    panels = zip(figure.subplots(1, 2), names.items(), strict=True)
    for axes, (name, title) in panels:
        axes.loglog(sizes, [getattr(x, name) for x in plans], "o-", color="#0072b2")
        label = f"batch of {start.batch_size}, {start.iterations} steps"
        options = {"color": "#d55e00", "zorder": 3, "label": label}
        axes.scatter([start.batch_size], [getattr(start, name)], s=70, **options)
        axes.set(xlabel="expected batch size", title=title)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    return figure


def _short(number: float) -> str:
    """Three digits, in millions or billions if the number is so large."""
    for size, name in ((1e9, " billion"), (1e6, " million")):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{name}"
    return f"{number:.0f}"
