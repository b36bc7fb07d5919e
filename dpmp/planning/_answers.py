"""The paragraphs, the tables and the picture that the command `plan` answers with."""

import argparse
import textwrap
from collections.abc import Sequence
from typing import Any

from dpmp import _pictures, _plain_text
from dpmp.accounting import DEFAULT_RELATION, digits_above
from dpmp.planning._methods import Method, Model
from dpmp.planning._plans import LARGEST_NOISE_NORM, NoiseChoice, Plan
from dpmp.planning.memory import MemoryEstimate
from dpmp.strategies import BandedInverse

# A method, the microbatch that fits (or 0), and the memory of a step.
Tried = tuple[Method, int, MemoryEstimate]

_UNITS = (
    "Noise in the mean gradient is in clip norms. Signal over noise is that of the sum "
    "of all steps, for gradients of one clip norm."
)
_REASON = (
    " The row to start from has the most steps, of those within 25 % of the best "
    "signal over noise. --batch-size or --steps overrules it."
)
COMPILING = (
    "Counting memory. To measure activations, sums of clipped gradients are compiled "
    "for the shapes of the model, and not run. This takes up to half a minute for each "
    "kind of training."
)
_NOT_ENOUGH = (
    "jax.checkpoint around each layer would not be enough. Use a smaller model, "
    "shorter examples (--length), or several devices (docs/many_devices.md)."
)
_THE_REST = (
    "The guides docs/own_weights.md, docs/lora.md and docs/finetune_llm.md have the "
    "rest of the program. Gradients have noise in num_parameters entries: change it, "
    "or leave it out, for a model of another size."
)
_ADAPTERS = """base = model.params  # {kind}
targets = "attention/.*kernel"  # by their names in your model
key = jax.random.key(0)
adapters = dpmp.lora.init(key, base, rank={rank}, targets=targets)
loss_fn = dpmp.lora.apply(loss_fn, base)"""


def about(model: Model) -> str:
    """The sizes of a model and of its adapters."""
    decoder = model.decoder
    return _plain_text.paragraph(
        f"The model has {_short(decoder.num_parameters)} parameters: {decoder.layers} "
        f"layers of width {decoder.width}, and a vocabulary of {decoder.vocabulary}. "
        f"LoRA of rank {model.rank} trains {_short(model.num_in_adapters)} entries. An "
        f"example has {model.length} tokens (--length)."
    )


def less_noise(choices: Sequence[NoiseChoice]) -> str:
    """What correlated noise and random allocation would gain, and cost."""
    best, (usual,) = choices[0], [x for x in choices if x.name == "poisson"]
    if best is usual:
        return _plain_text.paragraph(
            "Neither correlated noise nor random allocation would leave less noise in "
            "the parameters."
        )
    better = choices[: choices.index(usual)]
    # The best one of each kind: both kinds of strategies, and random allocation.
    kinds = {type(x.mechanism.strategy): x for x in reversed(better)}
    gains = [
        f"{1 - x.error / usual.error:.0%} less with {_how(x)}"
        for x in sorted(kinds.values(), key=lambda x: x.error)
    ]
    return _plain_text.paragraph(
        "At the same epsilon, batch size and steps, other ways to draw batches and "
        f"noise would leave less noise in the parameters: {'; '.join(gains)}. The "
        "figures are for SGD with a constant learning rate. docs/less_noise.md says "
        "what each way needs."
    )


def _how(choice: NoiseChoice) -> str:
    strategy = choice.mechanism.strategy
    if strategy is None:
        return 'sampling="random_allocation"'
    if isinstance(strategy, BandedInverse):
        return (
            f"dpmp.strategies.banded_inverse({strategy.bands}, iterations="
            f"{strategy.iterations}, steps_per_epoch={strategy.steps_per_epoch}) as "
            f"strategy, which draws noise {strategy.bands + 1} times"
        )
    return (
        f"dpmp.strategies.banded_toeplitz({strategy.bands}, iterations="
        f"{strategy.iterations}) as strategy, which takes "
        f"{choice.bytes_per_parameter} bytes a parameter"
    )


def noise(plan: Plan, trained: int, model: Model | None = None) -> str:
    """The norm of the noise, next to that of the mean gradient."""
    text = (
        f"The noise in the mean gradient has a norm of {plan.noise_norm(trained):.3g}, "
        f"over {_short(trained)} trained entries. The mean gradient itself has a norm "
        "of at most 1, the clip norm. The norm of the noise grows with the square root "
        "of the number of trained entries, so fewer of them may learn more."
    )
    if model is not None and model.num_in_adapters < trained:
        norm, rank = plan.noise_norm(model.num_in_adapters), model.rank
        text += f" LoRA of rank {rank} would have {norm:.3g}; --rank {rank} plans it."
    elif model is not None and plan.is_too_noisy(model.decoder.num_parameters):
        norm = plan.noise_norm(model.decoder.num_parameters)
        text += (
            f" With all parameters it would be {norm:.3g}. Above {LARGEST_NOISE_NORM}, "
            "that is not planned; fewer steps of larger batches (--steps) have less "
            "noise."
        )
    return _plain_text.paragraph(text)


def advice(method: Method, size: int, memory: MemoryEstimate) -> str:
    """What layers that are computed again in the backward pass would change."""
    if not size:
        return _plain_text.paragraph(_NOT_ENOUGH)
    return _plain_text.paragraph(
        "With jax.checkpoint around each layer (llm.load(..., remat=True)), every "
        f'layer is computed twice, and "{method.name}" fits, with microbatches of '
        f"{size} ({memory.total / 1e9:.1f} GB)."
    )


def program(
    args: argparse.Namespace,
    plan: Plan,
    method: Method | None = None,
    rank: int = 0,
    **more: int,
) -> str:
    """The lines of a program that make the mechanism, and what `method` trains."""
    imports = ["dpmp"]
    fields = {
        "num_examples": args.num_examples,
        "expected_batch_size": plan.batch_size,
        "iterations": plan.iterations,
        "l2_clip_norm": 1.0,
        **more,
    }
    if (relation := args.neighboring_relation) != DEFAULT_RELATION.name:
        imports.insert(0, "dp_accounting")
        fields["neighboring_relation"] = f"dp_accounting.NeighboringRelation.{relation}"
    lines = [
        "\nmechanism = dpmp.DPSGD(",
        *(f"    {name}={value}," for name, value in fields.items()),
        f").calibrate(epsilon={args.epsilon:g}, delta={args.delta:g})",
    ]
    if method is not None:
        lines.append(f"policy = {method.policy}")
        if method.is_lora:
            imports.append("jax")
            is_quantised = method.base_bits != 16
            kind = "quantised: docs/lora.md" if is_quantised else "in bfloat16"
            lines.append(_ADAPTERS.format(kind=kind, rank=rank))
    imported = [f"import {name}" for name in imports]
    text = textwrap.indent("\n".join([*imported, *lines]), "  ")
    rest = "" if method is None else f"\n\n{_plain_text.paragraph(_THE_REST)}"
    return f"Run this:\n\n{text}{rest}"


def hours(number: float, rate: float) -> str:
    """The time for a number of examples, tokens or operations, at a rate a second."""
    return f"At this rate it takes {number / rate / 3600:.3g} hours."


def not_planned(plan: Plan) -> str:
    """What only a run can tell."""
    return _plain_text.paragraph(
        "Measure on public data what this command cannot know: optimizer, clip norm "
        "and learning rate (try that of ordinary training, half and double), whether "
        f"{plan.iterations} steps of this size converge (mechanism.without_privacy()), "
        "speed, and the largest microbatch. See docs/settings.md."
    )


def running_time(
    model: Model, method: Method, plan: Plan, rate: tuple[float, str] | None
) -> str:
    """The operations of a run, and its hours if a speed is known."""
    num_examples = plan.batch_size * plan.iterations
    # Of the products in both passes, without norms and attention. There is no gradient
    # of a frozen matrix.
    share, size = 4 if method.is_lora else 6, model.decoder.num_parameters
    flops = share * size * num_examples * model.length
    time = "For its time, pass --rate with the speed that `fit` shows."
    if rate is not None:
        done = {"examples": num_examples, "tokens": num_examples * model.length}
        time = hours(done.get(rate[1], flops), rate[0])
    return _plain_text.paragraph(
        f"The run processes {_short(num_examples)} examples, in {flops:.2g} products "
        f"and additions. {time}"
    )


def table_of_plans(plans: Sequence[Plan], start: Plan, *, is_fixed: bool) -> str:
    """A row for each batch size, and why one of them is marked."""
    mark = "<- as you asked" if is_fixed else "<- start here"
    header = ["batch size", "steps", "noise multiplier", "noise in the mean gradient"]
    table = [[*header, "signal over noise", ""]]
    table += [
        [
            str(plan.batch_size),
            str(plan.iterations),
            digits_above(plan.noise_multiplier, 4),
            f"{plan.noise_in_mean:.2g}",
            f"{plan.signal_over_noise:.0f}",
            mark if plan == start else "",
        ]
        for plan in plans
    ]
    reason = _plain_text.paragraph(_UNITS if is_fixed else _UNITS + _REASON)
    return f"{_plain_text.table(table, '>>>>><')}\n\n{reason}"


def table_of_methods(model: Model, start: Plan, tried: Sequence[Tried]) -> str:
    """A row for each method that was tried."""
    rows = [["method", "trained", "norm of the noise", "GB", "microbatch"]]
    for method, size, memory in tried:
        trained = model.num_trained(method)
        # What does not fit without activations is not compiled.
        more = "" if "activations" in memory.by_name else "more than "
        needed, norm = f"{more}{memory.total / 1e9:.1f}", start.noise_norm(trained)
        cells = _short(trained), f"{norm:.3g}", needed, str(size or "does not fit")
        rows.append([method.name, *cells])
    return _plain_text.table(rows, "<>>>>")


def table_of_memory(memory: MemoryEstimate) -> str:
    """A row for each part of the memory of a step."""
    rows = [["", "GB", "size"]]
    rows += [[x.name, f"{x.num_bytes / 1e9:.3f}", x.formula] for x in memory.at_peak]
    rows.append(["total", f"{memory.total / 1e9:.3f}", f"during {memory.moment}"])
    return _plain_text.table(rows, "<><", indent="  ")


def draw(plans: Sequence[Plan], start: Plan) -> Any:
    """The noise multiplier, and the noise in the mean, against the batch size."""
    figure = _pictures.new_figure(figsize=(8, 3.4), layout="constrained")
    sizes = [plan.batch_size for plan in plans]
    names = {
        "noise_multiplier": "noise multiplier",
        "noise_in_mean": "noise in the mean gradient",
    }
    label = f"batch of {start.batch_size}, {start.iterations} steps"
    marked = {"s": 70, "color": "#d55e00", "zorder": 3, "label": label}
    panels = zip(figure.subplots(1, 2), names.items(), strict=True)
    for axes, (name, title) in panels:
        axes.loglog(sizes, [getattr(x, name) for x in plans], "o-", color="#0072b2")
        axes.scatter([start.batch_size], [getattr(start, name)], **marked)
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
