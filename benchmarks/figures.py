"""Which figures stand in the README and in the guides, and which lines give them?

Sentences and small tables are written by hand, with the figures in them. `figures.toml`
has each such passage with fields in place of the figures, and `fields` computes these
from `results/*.jsonl`. A test finds the passages on their pages, and finds no other
figure there. The tables of benchmarks/README.md need no entry, because `report.py`
makes them.
"""

import functools
import math
import pathlib
import tomllib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from dp_accounting.pld import common
from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss
from scipy import stats

from benchmarks.harness import mean_and_error
from benchmarks.markdown import Line, mean_with_error, pivot, read

_PASSAGES = pathlib.Path(__file__).with_suffix(".toml")


class Passage(NamedTuple):
    """A piece of a page, up to the breaks of its lines."""

    page: str
    text: str


def passages() -> list[Passage]:
    """All passages with figures, measured or not."""
    known, found = fields(), []
    for x in tomllib.loads(_PASSAGES.read_text())["passages"]:
        text = x["text"] if "reason" in x else x["text"].format_map(known)
        found.append(Passage(x["page"], text.strip()))
    return found


class Span(list[float]):
    """Values on several devices, shown as the least and the largest one."""

    def __format__(self, form: str) -> str:
        least, most = format(min(self), form), format(max(self), form)
        text = least if least == most else f"{least.rstrip('%')} to {most}"
        return text.replace("%", " %")


def fields() -> dict[str, Any]:
    """The figures, under the names that `figures.toml` has for them."""
    shown = selfcheck(
        "Share of noisy sums whose last bits reveal the sum without noise"
    )
    by_noise = "accuracy_by_noise", "data epsilon noise"
    by_task = "accuracy_by_precision", "task row"
    of_seeds = read("accuracy_by_precision", "task", "row", "seed", is_private=True)
    keys = ("task", "is_private", "seed")
    naive = read("accuracy_by_precision", *keys, row="bf16 naive")
    noise = read("large_runs", "device", question="noise")
    wanted = {"num_examples": 10**9, "sampling_prob": 1e-4}
    (batch,) = read("large_runs", "num_examples", **wanted)
    return {
        "size": selfcheck("Largest norm of a clipped gradient, over the clip norm"),
        "change": selfcheck(
            "Largest change of a sum between neighbouring batches, over the clip norm"
        ),
        "shown": shown,
        "ours_shown": "none" if max(shown["ours"]) < 0.01 else "some",
        "bits": selfcheck("Bits of the key that vary, and that the noise depends on"),
        "small": _times("transformer, 3M", 64, dtype="bfloat16"),
        "large": _times("SmolLM2, 135M", 8, dtype="bfloat16"),
        "lstm": _times("lstm", 64),
        "digits": _by("utility", "epsilon library", _accuracy, data="digits"),
        "spam": _by("utility", "epsilon library", _accuracy, data="e-mails"),
        "emails": _three_steps_on_emails(),
        "epoch": _epoch_on_emails(),
        "audits": _audits(),
        "faults": _sabotage(is_none=False),
        "sound": _sabotage(is_none=True),
        "verdicts": _verdicts(),
        "choice": _default_choices(),
        "loss": _by(*by_noise, lambda x: x["loss"]["mean"]),
        "accuracy": _by(*by_noise, lambda x: Span([x["accuracy"]["mean"]])),
        "score": {
            x["task"]: x["cells"] for x in pivot(of_seeds, "task", "{row}", "score")
        },
        "bytes": _by(*by_task, lambda x: x.get("bytes_per_parameter"), is_private=True),
        "lost_updates": Span(x["lost_updates"] for x in naive),
        **_few_bits(),
        "lora": _by("lora", "base", _megabytes),
        "noise": Span(x["milliseconds"]["exact"] for x in noise),
        "batch": batch["milliseconds"]["indices"],
        "attack": {str(x): _attacker(x) for x in (0.5, 1.0, 2.0, 4.0, 8.0)},
    }


def _by(
    benchmark: str, keys: str, figure: Callable[[Line], Any], **wanted: Any
) -> dict[str, Any]:
    """A figure of the last line for each combination of keys, in nested dicts."""
    names, found = keys.split(), {}
    for x in read(benchmark, *names, **wanted):
        *outer, last = (str(x[name]) for name in names)
        row = functools.reduce(lambda row, key: row.setdefault(key, {}), outer, found)
        row[last] = figure(x)
    return found


def _accuracy(line: Line) -> str:
    return mean_with_error(line["accuracy"])


def _megabytes(line: Line) -> dict[str, int]:
    """Of a frozen model, and of a step for its adapters."""
    step = line["argument_megabytes"] + line["temporary_megabytes"]
    return {"base": line["base_megabytes"], "step": step}


def selfcheck(measurement: str) -> dict[str, Span]:
    """The values of each subject, and the largest of dpmp as "ours"."""
    values: dict[str, Span] = {}
    for line in read("selfcheck_others", "device", measurement=measurement):
        for r in line["results"]:
            values.setdefault(r["subject"], Span()).append(r["value"])
    names = ("dpmp exact", "dpmp bounded", "dpmp float32")
    ours = [max(values[name]) for name in names if name in values]
    return {**values, "ours": Span([max(ours)])} if ours else values


def _times(task: str, batch_size: int, **wanted: Any) -> dict[str, dict[str, Span]]:
    """The time over that of another step: first the other one, then the step."""
    wanted |= {"task": task, "batch_size": batch_size}
    times: dict[str, dict[str, Span]] = {}
    for x in read("side_by_side", "device", "dtype", **wanted):
        for reference, over in x["time_over"].items():
            best = {k: over[name] for k, name in x["best"].items() if name in over}
            for name, ratio in {**over, **best}.items():
                times.setdefault(reference, {}).setdefault(name, Span()).append(ratio)
    return times


def _three_steps_on_emails() -> dict[str, str]:
    """Nats per token, of three seeds."""
    lines = [x for x in read("emails", "settings") if x["settings"]["steps"] == 3]
    names = ("private", "without privacy")
    listed = {
        name: [f"{x['nats_per_token'][name]:.3f}" for x in lines] for name in names
    }
    before = f"{lines[0]['nats_per_token']['before']:.3f}"
    texts = {k: f"{', '.join(x[:-1])} and {x[-1]}" for k, x in listed.items()}
    return {"before": before, **texts}


def _epoch_on_emails() -> dict[str, dict[str, float]]:
    """Nats per token after 30 steps, for each learning rate and kind of noise."""
    losses: dict[str, dict[str, float]] = {}
    for x in read("emails", "settings", "noise"):
        if x["settings"]["steps"] == 30:
            row = losses.setdefault(str(x["settings"]["learning_rate"]), {})
            row["before"] = x["nats_per_token"]["before"]
            row[x["noise"].removesuffix(" noise")] = x["nats_per_token"]["private"]
    return losses


def _audits() -> dict[str, Any]:
    lines = read("canaries", "way", "epsilon")
    return {
        "number": sum(x["seeds"] for x in lines),
        "above": sum(x["above"] for x in lines) or "no",
        "means": Span(x["shares"]["mean"] for x in lines),
    }


def _sabotage(*, is_none: bool) -> dict[str, Any]:
    """Audits of dpmp with mistakes in it, or without one."""
    faults = read("sabotage", "fault")
    lines = [x for x in faults if x["fault"].startswith("none") == is_none]
    return {
        "kinds": len(lines),
        "audits": sum(x["seeds"] for x in lines),
        "caught": sum(x["caught"] for x in lines) or "none",
    }


def _verdicts() -> dict[str, int]:
    lines = read("verdicts", "task")
    right = sum(x["safe"] == x["same_loss"] for x in lines)
    return {"right": right, "tasks": len(lines)}


def _default_choices() -> dict[str, Any]:
    lines = read("choice", "task", "dtype")
    return {
        "kinds": len({x["task"] for x in lines}),
        "regret": max(x["regret"] for x in lines),
        "book_keeping": sum(not x["best"].startswith("per_example") for x in lines),
        "cases": len(lines),
    }


def _few_bits() -> dict[str, Any]:
    """How much worse formats of few bits are than wider ones, in per cent."""
    adapters = "SmolLM2 adapters"
    small = ("mixed_bfloat16", "mixed_float16", "float8", "mxfp8", "int8")
    large = ("float8", "float32", "mixed_float16", "int8", "mxfp8")
    texts: dict[str, Any] = {}
    from_scratch, private_adapters = [], []
    for task, by_privacy in _scores().items():
        than = "mixed_bfloat16" if task == adapters else "float32"
        for privacy, rows in by_privacy.items():
            worse = {row: few_bits(task, privacy, row, than) for row in rows}
            texts[f"{task}, {privacy}"] = {
                row: "{:.1f} ± {:.1f}".format(*x) for row, x in worse.items()
            }
            if task != adapters:
                from_scratch += [worse[row][0] for row in small]
            elif privacy != "none":
                private_adapters += [worse[row][0] for row in large]
    return {
        "few_bits": texts,
        "most_of_few_bits": max(from_scratch),
        "most_of_private_adapters": max(private_adapters),
    }


def _scores() -> dict[str, dict[str, dict[str, np.ndarray]]]:
    """The scores of all seeds, by task, privacy and format."""
    keys = "task privacy row"
    return _by("precision_at_epsilon", keys, lambda x: np.array(x["score"]))


def few_bits(
    task: str, privacy: str, row: str, than: str = "float32"
) -> tuple[float, float]:
    """By how many per cent a format is worse than another, with its standard error."""
    scores = _scores()[task][privacy]
    worse: Any = 100 * (scores[row] - scores[than])
    return mean_and_error(-worse if task == "digits" else worse / scores[than])


def _attacker(epsilon: float) -> dict[str, str]:
    """What (epsilon, 1e-5) allows an attacker with 1 % of false positives."""
    delta, false_alarms = 1e-5, 0.01
    growth = math.exp(epsilon)
    bounds = growth * false_alarms + delta, 1 - (1 - delta - false_alarms) / growth
    claim = common.DifferentialPrivacyParameters(epsilon, delta)
    noise = GaussianPrivacyLoss.from_privacy_guarantee(claim)
    mu = 1 / noise.standard_deviation
    of_noise = stats.norm.cdf(stats.norm.ppf(false_alarms) + mu)
    return {
        "sure": _percent(growth / (1 + growth)),
        "most": _percent(min(bounds)),
        "of_noise": _percent(float(of_noise)),
    }


def _percent(x: float) -> str:
    """Two digits of a share, and as many nines as it has."""
    if x < 0.1:
        return f"{100 * x:.1f}"
    return f"{100 * x:.2f}" if x > 0.99 else f"{100 * x:.0f}"
