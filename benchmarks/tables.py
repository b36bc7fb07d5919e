"""What tables.toml names: rows with more than lines have, and words about all lines."""

from collections.abc import Callable, Iterable

from benchmarks.markdown import Line, each

_PROVED = ("dpmp book_keeping bounded", "dpmp per_example exact")
_DEFAULT_PEER = "jax_privacy, at once"


def _steps(lines: list[Line]) -> Iterable[Line]:
    """Steps with their times over that of others in the same framework."""
    for x in each(lines, "milliseconds"):
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


def _accounting(lines: list[Line]) -> Iterable[Line]:
    for x in lines:
        above = {
            what: x["values"][f"{what}, dpmp"] / x["values"][f"{what}, directly"] - 1
            for what in ("epsilon", "calibration")
        }
        yield {**x, "above": above}


def _long_runs(lines: list[Line]) -> Iterable[Line]:
    for x in lines:
        yield {**x, "more": {k: 100 * (y - 1) for k, y in x["time_ratio"].items()}}


def _checks(lines: list[Line]) -> Iterable[Line]:
    for x in lines:
        limits = [
            f"{words} {r[field]:.3g}"
            for words, field in (("at least", "at_least"), ("at most", "at_most"))
            for r in x["results"]
            if r[field]
        ]
        values = {r["subject"]: r["value"] for r in x["results"]}
        yield {**x, "allowed": limits[0] if limits else "", "values": values}


def _scaling(lines: list[Line]) -> Iterable[Line]:
    first = {x["scaling"]: x for x in lines if x["devices"] == x["processes"] == 1}
    for x in lines:
        one = first[x["scaling"]]["examples_per_second"]
        yield {**x, "speed": x["examples_per_second"] / one}


ROWS: dict[str, Callable[[list[Line]], Iterable[Line]]] = {
    "steps": _steps,
    "fastest": _fastest,
    "accounting": _accounting,
    "long_runs": _long_runs,
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


def _num_seeds(lines: list[Line]) -> str:
    numbers = sorted({len(x["accuracy"]) for x in lines})
    return " to ".join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))


WORDS: dict[str, Callable[[list[Line]], object]] = {
    "absences": _absences,
    "seeds": _num_seeds,
    "last": lambda lines: lines[-1],
}
