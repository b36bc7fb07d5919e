"""A report as HTML that opens without a network, and as a section in Markdown."""

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

from dpmp.accounting import digits_above
from dpmp.tools.ledger import describe_steps, digits_of

ASSUMED = (
    "Each person is one example at most, in every run that is named here.",
    "All runs on the data of these people are named here.",
    "The random bits of the operating system are ideal, and nobody knows the keys.",
    "The gradient of an example depends on this example and the parameters alone.",
    "Hyper-parameters were not chosen by looking at values without noise.",
)
NOT_COVERED = (
    "Running time, which depends a little on the sizes of batches.",
    "Losses, gradient norms and other values of single examples.",
    "Anything else that is released about the data, such as an evaluation on them.",
    "What can be learned about a person from other people's data.",
)


def success(curve: Sequence[tuple[float, float]], rate: float) -> float:
    """The largest true-positive rate of an attack with a false-positive rate.

    Whoever guesses that an example was in the data is right with probability
    exp(epsilon) times the false-positive rate, plus delta, at most. This holds for all
    pairs of epsilon and delta. The same holds for guesses that it was not.
    """
    bounds = [math.exp(min(e, 700)) * rate + d for d, e in curve]
    bounds += [1 - math.exp(-e) * (1 - rate - d) for d, e in curve]
    return min([1.0, *bounds])


def _parameters(report: dict[str, Any]) -> str:
    epsilon, delta = digits_of(report["epsilon"]), digits_above(report["delta"], 3)
    return f"epsilon {epsilon}, delta {delta}"


def headline(report: dict[str, Any]) -> str:
    """The claim in one line."""
    if report["epsilon"] is None:
        return "Trained without a claim of differential privacy"
    return (
        f"Trained with differential privacy: {_parameters(report)}, for "
        f"{report['protected_unit']} of the training data"
    )


def _meaning(report: dict[str, Any]) -> str:
    """The claim in words; without an epsilon, nothing is claimed."""
    if report["epsilon"] is None:
        return "Nothing is claimed: the model may reveal any of its training data."
    sure = math.ceil(1e4 / (1 + math.exp(-report["epsilon"]))) / 100
    return (
        "For two datasets that differ in one example, the probability of any released "
        f"model on one is at most exp({digits_of(report['epsilon'])}) times its "
        f"probability on the other, plus {digits_above(report['delta'], 3)}. Whoever "
        "takes it for a coin toss whether a record was in the data can become at most "
        f"{sure:g} % sure from the model, but for a probability of about delta."
    )


_SHOWN = (
    "selfcheck: the arithmetic on its device is as proved. canaries and memorization: "
    "an attack proves that epsilon is at least the number that is given, so that a "
    "lower claim is false. replay and sums: for the examples that were tried, some "
    "steps showed nothing but noisy gradients, and sums changed by no more than the "
    "noise is for. A check that holds found no mistake, and proves no claim. None can "
    "know which program made the model, nor whose losses memorization was given."
)
_WHETHER_FILES = {
    True: ", which its files have",
    False: ", WHICH ITS FILES DO NOT HAVE",
    None: ", NOT COMPARED: its files are not in the directory",
}
_WHOSE = {
    True: ", with the mechanism of these runs",
    False: ", WITH ANOTHER MECHANISM than that of these runs",
    None: "",
}


def described_checkpoints(report: dict[str, Any]) -> list[str]:
    """The hash of each released checkpoint, and whether its files have it."""
    return [
        f"{path}, step {x['step']}: {x['blake2b']}{_WHETHER_FILES[x['files_have_it']]}"
        for path, x in report["checkpoints"].items()
        if x
    ]


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The questions of NIST SP 800-226, section by section, and their answers."""
    steps = map(describe_steps, report["directories"])
    checked = [
        (
            f"Checks in {x['file']}, on {x['device']}",
            (f"{x['passed']} of {x['number']} hold" if x["number"] else "none can fail")
            + _WHOSE[x["of_these_runs"]]
            + (f": {'; '.join(x['names'])}" if x["names"] else ""),
        )
        for x in report["checks"]
    ]
    about = [("What was trained", report["about"])] if report["about"] else []
    composition = "all runs that are named here add up"
    if report["epsilon_if_planned"] != report["epsilon"]:
        planned = digits_of(report["epsilon_if_planned"])
        composition += f"; if all were planned before the first: epsilon {planned}"
    sizes = ", ".join(
        f"{path}: {'not shown, it is protected' if x is None else x}"
        for path, x in report["num_examples"].items()
    )
    return [
        *about,
        ("Privacy parameters", _parameters(report)),
        ("Unit of privacy", report["protected_unit"]),
        ("Examples in the data", sizes),
        ("Neighbouring datasets", report["neighbours"]),
        (
            "Trust model",
            "central: whoever trains sees the data, and releases the model",
        ),
        (
            "Mechanism",
            "training steps, whose clipping and noise give no claim"
            if report["epsilon"] is None
            else "DP-SGD: per-example clipping, Gaussian noise in integers",
        ),
        ("Steps that were paid for", "; ".join(steps)),
        ("Composition", composition),
        ("Accountant", report["accountant"]),
        (
            "Released checkpoints (BLAKE2b)",
            "; ".join(described_checkpoints(report)) or "none",
        ),
        *(checked or [("Checks", "none were passed to this report")]),
        ("What checks show", _SHOWN),
        ("Software", ", ".join(map(" ".join, report["versions"].items()))),
    ]


def _attack_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Rates in percent; bounds are rounded up."""
    rates = [
        (x["false_positive_rate"], x["true_positive_rate_at_most"])
        for x in report["attacks"]
    ]
    return [(f"{x:.1%}", f"{math.ceil(1000 * y) / 1000:.1%}") for x, y in rates]


def as_markdown(report: dict[str, Any]) -> str:
    """A section for a model card."""

    def table(head: str, rows: Iterable[tuple[str, str]]) -> str:
        cells = [
            "| {} | {} |".format(*(x.replace("|", r"\|") for x in y)) for y in rows
        ]
        return "\n".join([head, "| --- | --- |", *cells])

    def items(title: str, texts: Iterable[str]) -> str:
        return "\n".join([f"{title}:\n", *(f"- {x}" for x in texts)])

    attacks = "| false positives of an attack | true positives at most |"
    parts = [
        "## Privacy",
        *report["remarks"],
        f"{headline(report)}. {_meaning(report)}",
        table("| | |", _rows(report)),
        table(attacks, _attack_rows(report)),
        items("Assumed", ASSUMED),
        items("Not covered", NOT_COVERED),
    ]
    return "\n\n".join(parts)


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Privacy report</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 44rem; margin: 2rem auto;
  padding: 0 1rem; color: #222; }}
h1 {{ font-size: 1.4rem; }} h2 {{ font-size: 1.1rem; margin-top: 2rem; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; vertical-align: top; padding: .4rem .6rem;
  border-bottom: 1px solid #ddd; overflow-wrap: anywhere; }}
th {{ width: 34%; font-weight: 600; }}
svg {{ max-width: 100%; height: auto; }}
</style>
</head>
<body>
<h1>{headline}</h1>
{remarks}
<p>{meaning}</p>
<h2>What an attacker can learn</h2>
<p>Somebody guesses from the released model whether an example was in the data. False
positives are examples that were not, and are guessed to be. True positives are those
that were. Blind guesses have equal shares of both, as the dashed line.</p>
{attacks}
{picture}
<h2>Questions of NIST SP 800-226</h2>
{rows}
<h2>Assumed</h2>
{assumed}
<h2>Not covered</h2>
{not_covered}
</body>
</html>"""


def as_html(report: dict[str, Any]) -> str:
    """A page without scripts and links."""

    def table(rows: Iterable[tuple[str, str]], head: str = "") -> str:
        cells = (
            f"<tr><th>{html.escape(a)}</th><td>{html.escape(b)}</td></tr>"
            for a, b in rows
        )
        return f"<table>{head}{''.join(cells)}</table>"

    def items(texts: Iterable[str]) -> str:
        return f"<ul>{''.join(f'<li>{html.escape(x)}</li>' for x in texts)}</ul>"

    head = "<tr><th>false positives</th><th>true positives, at most</th></tr>"
    return _PAGE.format(
        headline=html.escape(headline(report)),
        remarks="".join(f"<p><b>{html.escape(x)}</b></p>" for x in report["remarks"]),
        meaning=html.escape(_meaning(report)),
        attacks=table(_attack_rows(report), head),
        picture=_picture(report),
        rows=table(_rows(report)),
        assumed=items(ASSUMED),
        not_covered=items(NOT_COVERED),
    )


def _picture(report: dict[str, Any]) -> str:
    """The bound on true positives over false positives, as SVG."""
    curve = [(x["delta"], x["epsilon"]) for x in report["curve"]]
    left, top, size = 50, 10, 260

    def point(x: float, y: float) -> str:
        return f"{left + size * x:.1f},{top + size * (1 - y):.1f}"

    rates = [k / 100 for k in range(101)]
    bound = " ".join(point(x, success(curve, x)) for x in rates)
    ticks = "".join(
        f'<text x="{left + size * x - 8:.0f}" y="{top + size + 18}">{x:.0%}</text>'
        f'<text x="{left - 42}" y="{top + size * (1 - x) + 4:.0f}">{x:.0%}</text>'
        for x in (0, 0.5, 1)
    )
    return (
        f'<svg viewBox="0 0 {left + size + 30} {top + size + 44}" width="400" '
        f'font-size="12" role="img"><title>The bound on true positives</title>'
        f'<rect x="{left}" y="{top}" width="{size}" height="{size}" fill="none" '
        f'stroke="#999"/><polyline points="{point(0, 0)} {point(1, 1)}" fill="none" '
        f'stroke="#999" stroke-dasharray="4"/><polyline points="{bound}" fill="none" '
        f'stroke="#0072b2" stroke-width="2"/>{ticks}'
        f'<text x="{left + 90}" y="{top + size + 36}">false positives</text>'
        f'<text x="{left + 6}" y="{top + 16}">true positives, at most</text></svg>'
    )
