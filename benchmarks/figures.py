"""Which figures stand in the README and in the guides, and which lines give them?

Sentences and small tables are written by hand, with the figures in them. `figures.toml`
has each such passage with fields in place of the figures, and `fields` computes these
from `results/*.jsonl`. A test finds the passages on their pages, and finds no other
figure there. The tables of benchmarks/README.md need no entry, because `report.py`
makes them.
"""

import math
import pathlib
import tomllib
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, stats

from benchmarks.markdown import Line, mean_with_error, read

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
        "digits": _by_epsilon("digits"),
        "spam": _by_epsilon("e-mails"),
        "emails": _three_steps_on_emails(),
        "epoch": _epoch_on_emails(),
        "audits": _audits(),
        "faults": _sabotage(is_none=False),
        "sound": _sabotage(is_none=True),
        "verdicts": _verdicts(),
        "choice": _default_choices(),
        **_accuracy_by_noise(),
        **_states(),
        **_few_bits(),
        "lora": _packed_bases(),
        "noise": _noise_of_large_runs(),
        "batch": _batch_of_large_runs(),
        "attack": {str(x): _attacker(x) for x in (0.5, 1.0, 2.0, 4.0, 8.0)},
    }


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


def _by_epsilon(data: str) -> dict[str, dict[str, str]]:
    """The accuracy for each epsilon and library."""
    cells: dict[str, dict[str, str]] = {}
    for x in read("utility", "library", "epsilon", data=data):
        row = cells.setdefault(str(x["epsilon"]), {})
        row[x["library"]] = mean_with_error(x["accuracy"])
    return cells


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


def _accuracy_by_noise() -> dict[str, Any]:
    """Losses after one epoch and after four, by epsilon and noise, and accuracies."""
    found: dict[str, Any] = {"once": {}, "four": {}, "accuracy": {}}
    for x in read("accuracy_by_noise", "data", "epsilon", "noise"):
        is_once = x["data"] == "digits, one epoch"
        by_epsilon = found["once" if is_once else "four"]
        by_epsilon.setdefault(str(x["epsilon"]), {})[x["noise"]] = x["loss"]["mean"]
        if is_once and x["epsilon"] == 8:
            found["accuracy"][x["noise"]] = Span([x["accuracy"]["mean"]])
    return found


def _states() -> dict[str, Any]:
    """The bytes of a parameter and its averages, and scores, by precision."""
    keys = ("task", "is_private", "row", "seed")
    lines = read("accuracy_by_precision", *keys, is_private=True)
    state: dict[str, dict[str, Any]] = {}
    adapters: dict[str, dict[str, Any]] = {}
    for scored in _by(lines, "task", "row"):
        task, row = scored[-1]["task"], scored[-1]["row"]
        size = scored[-1].get("bytes_per_parameter")
        score = mean_with_error([x["score"] for x in scored])
        if task.startswith("adapters"):
            adapters[task.split()[1]] = {"size": size, "score": score}
        else:
            state.setdefault(row, {})[task] = score
            if task == "digits":
                state[row]["size"] = size
    naive = read("accuracy_by_precision", *keys, row="bf16 naive")
    lost = Span(x["lost_updates"] for x in naive)
    return {"state": state, "adapters": adapters, "lost_updates": lost}


def _by(lines: Iterable[Line], *keys: str) -> Iterable[list[Line]]:
    """The lines with the same values of some keys."""
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for x in lines:
        groups.setdefault(tuple(x[key] for key in keys), []).append(x)
    return groups.values()


def _few_bits() -> dict[str, Any]:
    """How much worse formats of few bits are than wider ones, in per cent."""
    tasks = {
        "digits": "float32",
        "transformer": "float32",
        "SmolLM2 adapters": "mixed_bfloat16",
    }
    worse = {
        (task, privacy, row): few_bits(task, privacy, row, than)
        for task, than in tasks.items()
        for privacy in ("epsilon 8", "epsilon 1", "none")
        for row in scores_of(task, privacy)
    }
    texts: dict[str, dict[str, str]] = {}
    for (task, privacy, row), figures in worse.items():
        text = "{:.1f} ± {:.1f}".format(*figures)
        texts.setdefault(f"{task}, {privacy}", {})[row] = text
    small = ("mixed_bfloat16", "mixed_float16", "float8", "mxfp8", "int8")
    large = ("float8", "float32", "mixed_float16", "int8", "mxfp8")
    return {
        "few_bits": texts,
        "most_of_few_bits": max(
            x
            for (task, _, row), (x, _) in worse.items()
            if task != "SmolLM2 adapters" and row in small
        ),
        "most_of_private_adapters": max(
            x
            for (task, privacy, row), (x, _) in worse.items()
            if task == "SmolLM2 adapters" and privacy != "none" and row in large
        ),
    }


def scores_of(task: str, privacy: str) -> dict[str, np.ndarray]:
    """The scores of all seeds, by format."""
    lines = read("precision_at_epsilon", "row", task=task, privacy=privacy)
    return {x["row"]: np.array(x["score"]) for x in lines}


def few_bits(
    task: str, privacy: str, row: str, than: str = "float32"
) -> tuple[float, float]:
    """By how many per cent a format is worse than another, with its standard error."""
    scores = scores_of(task, privacy)
    worse = 100 * (scores[row] - scores[than])
    worse = -worse if task == "digits" else worse / scores[than]
    return float(np.mean(worse)), float(np.std(worse, ddof=1) / len(worse) ** 0.5)


def _packed_bases() -> dict[str, dict[str, int]]:
    """Megabytes of a frozen model and of a step for its adapters."""
    return {
        x["base"]: {
            "base": x["base_megabytes"],
            "step": x["argument_megabytes"] + x["temporary_megabytes"],
        }
        for x in read("lora", "base")
    }


def _noise_of_large_runs() -> Span:
    lines = read("large_runs", "device", question="noise")
    return Span(x["milliseconds"]["exact"] for x in lines)


def _batch_of_large_runs() -> float:
    wanted = {"num_examples": 10**9, "sampling_prob": 1e-4}
    (line,) = read("large_runs", "num_examples", **wanted)
    return line["milliseconds"]["indices"]


def _attacker(epsilon: float) -> dict[str, str]:
    """What (epsilon, 1e-5) allows an attacker with 1 % of false positives."""
    delta, false_alarms = 1e-5, 0.01

    def excess(mu: float) -> float:
        below, above = stats.norm.cdf(np.array([mu, -mu]) / 2 - epsilon / mu)
        return float(below - math.exp(epsilon) * above - delta)

    growth = math.exp(epsilon)
    bounds = growth * false_alarms + delta, 1 - (1 - delta - false_alarms) / growth
    mu = optimize.brentq(excess, 1e-3, 50)
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
