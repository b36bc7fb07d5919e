"""What tables.toml names: rows with more than lines have, and words about all lines."""

import statistics
from collections.abc import Callable, Iterable

from benchmarks.markdown import Line, mean_with_error

_PROVED = ("dpmp book_keeping bounded", "dpmp per_example exact")
_DEFAULT_PEER = "jax_privacy, at once"
_EXACTNESS = {
    "clip_and_sum": "clip and sum 64 gradients of a million entries",
    "clipped_grad": "the same with the gradients of an MLP",
    "step": "a training step of a transformer",
    "noise": "noise for ten million entries",
}


def _each(lines: list[Line], field: str) -> Iterable[Line]:
    """Rows for each name in a field."""
    return ({**x, "name": name} for x in lines for name in x[field])


def _contenders(lines: list[Line]) -> Iterable[Line]:
    for x in _each(lines, "milliseconds"):
        yield {**x, "processor": _processor(x)}


def _processor(line: Line) -> str:
    return line["device"].partition(",")[0]


def _steps(lines: list[Line]) -> Iterable[Line]:
    """Steps with their times over that of others in the same framework."""
    for x in _each(lines, "milliseconds"):
        is_torch = x["name"].startswith(("torch", "Opacus"))
        prefix, ratios = "torch, " if is_torch else "", x["time_over"]
        over = {k: ratios.get(prefix + k, {}).get(x["name"]) for k in ratios}
        yield {**x, "over": over}


def _fastest(lines: list[Line]) -> Iterable[Line]:
    """The fastest step of dpmp that is proved, of each line."""
    for x in lines:
        times = {k: t for k, t in x["milliseconds"].items() if k.startswith(_PROVED)}
        name = min(times, key=times.__getitem__)
        memory, compiled = x["growth_megabytes"], x["compile_seconds"]
        peer = memory.get(_DEFAULT_PEER)
        yield {
            **x,
            "name": name,
            "step": name.removeprefix("dpmp "),
            "memory": memory[name] / peer if name in memory and peer else None,
            "compile": compiled[name] / compiled["plain"],
        }


def _growth(lines: list[Line]) -> Iterable[Line]:
    for x in lines:
        first, last = (x["points"][i]["milliseconds"] for i in (0, -1))
        yield {**x, "ms": {k: f"{first[k]:.3g} to {last[k]:.3g}" for k in first}}


def _accounting(lines: list[Line]) -> Iterable[Line]:
    for x in lines:
        above = {
            what: x["values"][f"{what}, dpmp"] / x["values"][f"{what}, directly"] - 1
            for what in ("epsilon", "calibration")
        }
        yield {**x, "above": above}


def _importing(lines: list[Line]) -> Iterable[Line]:
    for x in _each(lines, "seconds"):
        least, most = x["range"][x["name"]]
        yield {**x, "least": least, "most": most}


def _exactness(lines: list[Line]) -> Iterable[Line]:
    order = list(_EXACTNESS)
    for x in sorted(lines, key=lambda x: (order.index(x["question"]), x["dtype"])):
        yield {**x, "processor": _processor(x), "what": _EXACTNESS[x["question"]]}


def _book_keeping(lines: list[Line]) -> Iterable[Line]:
    for x in _each(lines, "time_ratio"):
        if x["name"].startswith("dpmp"):
            yield {**x, "parts": x["name"].removeprefix("dpmp").strip(", ")}


def _sums(lines: list[Line]) -> Iterable[Line]:
    return (x for x in lines if "exact" in x["figures"])


def _long_runs(lines: list[Line]) -> Iterable[Line]:
    for x in lines:
        yield {**x, "more": {k: 100 * (y - 1) for k, y in x["time_ratio"].items()}}


def _scores(lines: list[Line]) -> Iterable[Line]:
    """A row for each precision, with the mean score and the range of each task."""
    scores: dict[str, dict[str, list[float]]] = {}
    for x in lines:
        private = "private" if x["is_private"] else "not private"
        task = f"{x['task']}, {x['metric']}, {private}"
        scores.setdefault(x["row"], {}).setdefault(task, []).append(x["score"])
    for row, columns in scores.items():
        cells = {
            task: f"{statistics.mean(x):.3f} ({min(x):.3f} to {max(x):.3f})"
            for task, x in columns.items()
        }
        yield {"row": row, "cells": cells}


def _means(value: str) -> Callable[[list[Line]], Iterable[Line]]:
    """A row for each epsilon, with the mean over seeds of each library."""

    def rows(lines: list[Line]) -> Iterable[Line]:
        found: dict[str, Line] = {}
        for x in lines:
            epsilon = "none" if x["epsilon"] is None else f"{x['epsilon']:g}"
            row = found.setdefault(epsilon, {"epsilon": epsilon, "cells": {}})
            row["cells"][x["library"]] = mean_with_error(x[value])
        return found.values()

    return rows


def _emails(lines: list[Line]) -> Iterable[Line]:
    for x in lines:
        yield {**x, "nats": {k: f"{y:.3f}" for k, y in x["nats_per_token"].items()}}


def _checks(lines: list[Line]) -> Iterable[Line]:
    for x in lines:
        limits = [
            f"{words} {r[field]:.3g}"
            for words, field in (("at least", "at_least"), ("at most", "at_most"))
            for r in x["results"]
            if r[field]
        ]
        values = {r["subject"]: f"{r['value']:.4g}" for r in x["results"]}
        yield {**x, "allowed": limits[0] if limits else "", "values": values}


def _scaling(lines: list[Line]) -> Iterable[Line]:
    first = {x["scaling"]: x for x in lines if x["devices"] == x["processes"] == 1}
    for x in lines:
        one = first[x["scaling"]]["examples_per_second"]
        yield {**x, "speed": x["examples_per_second"] / one}


ROWS: dict[str, Callable[[list[Line]], Iterable[Line]]] = {
    "contenders": _contenders,
    "steps": _steps,
    "fastest": _fastest,
    "growth": _growth,
    "accounting": _accounting,
    "importing": _importing,
    "exactness": _exactness,
    "book_keeping": _book_keeping,
    "sums": _sums,
    "long_runs": _long_runs,
    "scores": _scores,
    "mean accuracy": _means("accuracy"),
    "mean loss": _means("loss"),
    "emails": _emails,
    "checks": _checks,
    "scaling": _scaling,
}


def _absences(lines: list[Line]) -> str:
    """What was not measured side by side, in words."""
    pairs = {
        f"{x['task']}: {name} ({reason})"
        for x in lines
        for name, reason in {**x["absent"], **x["refused"]}.items()
    }
    return " Not measured: " + "; ".join(sorted(pairs)) + "." if pairs else ""


def _not_installed(lines: list[Line]) -> str:
    absent = lines[0]["absent"]
    return f" Not installed: {', '.join(absent)}." if absent else ""


def _sizes(lines: list[Line]) -> str:
    ends = {x["axis"]: [x["points"][i]["size"] for i in (0, -1)] for x in lines}
    return "; ".join(f"{axis} {a} to {b}" for axis, (a, b) in ends.items())


def _num_seeds(lines: list[Line]) -> str:
    numbers = sorted({len(x["accuracy"]) for x in lines})
    return " to ".join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))


def _num_images(lines: list[Line]) -> str:
    sizes = dict.fromkeys((x["num_examples"], x["data"]) for x in lines)
    return " and then ".join(f"{n} images of {name}" for n, name in sizes)


WORDS: dict[str, Callable[[list[Line]], object]] = {
    "absences": _absences,
    "not_installed": _not_installed,
    "sizes": _sizes,
    "seeds": _num_seeds,
    "images": _num_images,
    "last": lambda lines: lines[-1],
}
