"""Measures of synthetic texts: what they teach, what they repeat, what a model kept."""

import functools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import llm
import numpy as np
from labelled_records import Labelled
from matplotlib.figure import Figure
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from sklearn.pipeline import make_pipeline

RUNS = (4, 8, 16)  # lengths in words
NUM_CODES = 256  # each canary is compared with all the others
COLORS = {
    "before": "#999999",
    "private": "#0072b2",
    "without privacy": "#d55e00",
    "held out": "#009e73",
    "real texts": "black",
}


def accuracy(train: Sequence[Labelled], test: Sequence[Labelled]) -> float:
    """Of a logistic regression on words and pairs of words, trained on some texts.

    It is the mean over the labels of the share that is recognised (balanced accuracy),
    so that one answer for all scores one over the number of labels.
    """
    (labels, texts), (true, unseen) = (zip(*x, strict=True) for x in (train, test))
    if len(set(labels)) == 1:
        return balanced_accuracy_score(true, labels[:1] * len(true))
    words = HashingVectorizer(ngram_range=(1, 2), n_features=2**18)
    model = make_pipeline(words, LogisticRegression(C=100, class_weight="balanced"))
    return balanced_accuracy_score(true, model.fit(texts, labels).predict(unseen))


def shared_runs(records: Sequence[Labelled], texts: Sequence[Labelled]) -> np.ndarray:
    """The class of each record: how many of `RUNS` it reaches with one of the texts.

    A record reaches 8 if it has 8 words in a row that a text has in a row as well. Its
    class depends on this record and the texts, and not on other records.
    """
    reached = np.zeros(len(records), int)
    for length in RUNS:
        known = set().union(*(_runs(text, length) for _, text in texts))
        reached += [not known.isdisjoint(_runs(text, length)) for _, text in records]
    return reached


def _runs(text: str, length: int) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}


def shares_reached(counts: np.ndarray) -> list[float]:
    """The share of records that reach each of `RUNS`, given the counts of classes."""
    at_least = np.cumsum(counts[::-1])[::-1][1:]
    return [round(float(x), 5) for x in at_least / np.sum(counts)]


def stddevs_of_shares(shares: Sequence[float], stddev: float) -> np.ndarray:
    """The standard deviations of the noise on shares that `shares_reached` returns.

    `stddev` is that of a count, divided by the number of records. A share is a sum of
    counts over the sum of all, so that the noise of several counts adds up.
    """
    numerator = np.arange(len(RUNS), 0, -1)  # classes that reach each length
    p, others = np.asarray(shares), 1 + len(RUNS) - numerator
    return stddev * np.sqrt(numerator * (1 - p) ** 2 + others * p**2)


def shares_of(records: Sequence[Labelled], texts: Sequence[Labelled]) -> list[float]:
    """The same without noise, for public records."""
    classes = shared_runs(records, texts)
    return shares_reached(np.bincount(classes, minlength=len(RUNS) + 1))


def canaries(seed: int) -> list[str]:
    """Texts that differ in a code of six random digits."""
    codes = np.random.default_rng(seed).choice(10**6, NUM_CODES, replace=False)
    return [f"The door code is {code:06}." for code in codes]


def exposures(nats: np.ndarray, num_planted: int) -> list[float]:
    """How well a model knows the planted canaries, which come first, in bits.

    The exposure of a canary is log2(256) - log2(rank), where its rank among all
    canaries is 1 if the model finds no other more probable. Carlini et al. (2019),
    https://arxiv.org/abs/1802.08232, section 4.
    """
    ranks = [1 + np.sum(nats[num_planted:] < x) for x in nats[:num_planted]]
    return [round(float(np.log2(NUM_CODES / rank)), 2) for rank in ranks]


def summed_nats(apply: Any, params: Any, batch: llm.losses.Batch) -> np.ndarray:
    """Minus the log probability of each text; the texts are public."""
    run = jax.jit(functools.partial(llm.summed_nats, apply))
    end = 1 + np.max(np.nonzero(batch["is_target"])[1])  # of the longest text
    starts = range(0, len(batch["tokens"]), 32)
    parts = ({name: x[i : i + 32, :end] for name, x in batch.items()} for i in starts)
    return np.concatenate([np.asarray(run(params, part)[0]) for part in parts])


def draw(report: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draws losses, accuracies, shared runs, and exposures if canaries were planted."""
    draw_fns = [_draw_losses, _draw_accuracies, _draw_shared_runs]
    if "exposures" in report:
        draw_fns.append(_draw_exposures)
    figure = Figure(figsize=(3.8 * len(draw_fns), 3.4), layout="constrained")
    for axes, draw_fn in zip(figure.subplots(1, len(draw_fns)), draw_fns, strict=True):
        draw_fn(axes, report)
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize("medium")
    figure.savefig(path, dpi=150)


def _draw_losses(axes: Any, report: Mapping[str, Any]) -> None:
    _draw_bars(axes, report["not_protected"]["nats_per_token"])
    axes.margins(x=0.3)  # for the figures next to the bars
    axes.set(xlabel="nats per token")
    axes.set_title("Loss on held-out records")


def _draw_accuracies(axes: Any, report: Mapping[str, Any]) -> None:
    _draw_bars(axes, report["not_protected"]["accuracy"])
    axes.axvline(1 / len(report["noisy_label_counts"]), color="black", ls=":", lw=1)
    axes.set(xlim=(0, 1), xlabel="balanced accuracy (dotted: a guess)")
    axes.set_title("Classifier trained on the texts")


def _draw_bars(axes: Any, found: Mapping[str, float]) -> None:
    bars = axes.barh(
        list(found), list(found.values()), color=[COLORS[x] for x in found]
    )
    axes.bar_label(bars, fmt="%.3f", padding=6)
    axes.invert_yaxis()


def _draw_shared_runs(axes: Any, report: Mapping[str, Any]) -> None:
    private, places = report["shared_runs"], np.arange(len(RUNS))
    names = {"held out": "held-out records"}
    noise = 2 * np.asarray(private["stddevs"])
    line = {"color": COLORS["private"], "label": "private records", "capsize": 3}
    axes.errorbar(places, private["shares"], noise, marker="o", **line)
    for name, shares in report["not_protected"]["shared_runs"].items():
        axes.plot(places, shares, "o-", color=COLORS[name], label=names.get(name, name))
    axes.axhline(0, color="black", lw=0.5)
    axes.set_xticks(places, [str(x) for x in RUNS])
    axes.set(xlabel="words in a row (bars: noise, 2 stddevs)")
    axes.set_title("Share of records that a text repeats")
    axes.legend(frameon=False)


def _draw_exposures(axes: Any, report: Mapping[str, Any]) -> None:
    found = report["exposures"] | report["not_protected"].get("exposures", {})
    for i, (name, values) in enumerate(found.items()):
        axes.plot([i] * len(values), values, "o", color=COLORS[name], alpha=0.6)
    axes.axhline(np.log2(NUM_CODES), color="black", ls=":", lw=1)
    axes.set_xticks(range(len(found)), [x.replace(" ", "\n") for x in found])
    axes.set(ylabel="bits (dotted: known by heart)", ylim=(-0.3, 8.5))
    axes.set_xlim(-0.5, len(found) - 0.5)
    axes.set_title("Exposure of planted canaries")
