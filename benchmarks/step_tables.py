"""Tables of whole steps and of their parts; see `benchmarks/report.py`."""

from benchmarks.markdown import (
    Line,
    Row,
    by_device,
    has_lines,
    read,
    section,
    table,
)

_PROVED = ("dpmp book_keeping bounded", "dpmp per_example exact")
_DEFAULT_PEER = "jax_privacy, at once"
_OVER = ("plain", "fastest plain", _DEFAULT_PEER, "jax_privacy, best")


def sections() -> list[str]:
    """The sections that have lines."""
    return [make() for name, make in _SECTIONS.items() if has_lines(name)]


def _side_by_side() -> str:
    lines = read("side_by_side", "task", "dtype", "batch_size", "device")
    groups = by_device(lines)
    fastest = [
        f"### The fastest, {name}\n\n{_table_of_fastest(some)}"
        for name, some in groups.items()
    ]
    details = [
        f"### All steps, {name}\n\n{_table_of_steps(some)}"
        for name, some in groups.items()
    ]
    return section(
        "Side by side",
        "Whole training steps: gradients, clipping, noise and Adam. First the fastest "
        "step of dpmp whose guarantee holds for the bits that are computed: its time "
        "over that of the others, its memory over that of the default of jax_privacy, "
        "and its time to compile over that of the plain step. Opacus is compared with "
        "the plain step of PyTorch. A number at the end of a name is the microbatch "
        "size." + _absences(lines),
        "side_by_side",
        lines,
        *fastest,
        'In the tables of all steps, "MB" is by how much the process grows in a step, '
        "beside parameters and optimizer. The steps of PyTorch and Opacus are compared "
        "with PyTorch's plain step, all others with that of jax.",
        *details,
    )


def _table_of_fastest(lines: list[Line]) -> str:
    header = ["model", "batch", "dtype", "step of dpmp", "/ plain", "/ fastest plain"]
    header += ["/ jax_privacy", "/ its best", "memory / jax_privacy", "compile / plain"]
    header += ["Opacus, hooks / torch", "Opacus, ghost / torch"]
    return table(header, map(_fastest, lines))


def _fastest(line: Line) -> Row:
    """What a reader compares, for the fastest step of dpmp that is proved."""
    times = {k: x for k, x in line["milliseconds"].items() if k.startswith(_PROVED)}
    name = min(times, key=times.__getitem__)
    return (
        *(line[key] for key in ("task", "batch_size", "dtype")),
        name.removeprefix("dpmp "),
        *(_ratio(line, what, name) for what in _OVER),
        _quotient(line["growth_megabytes"], name, _DEFAULT_PEER),
        _quotient(line["compile_seconds"], name, "plain"),
        *(_ratio(line, "plain", f"Opacus, {kind}") for kind in ("hooks", "ghost")),
    )


def _quotient(figures: dict[str, float], name: str, reference: str) -> float | None:
    if name in figures and figures.get(reference):
        return figures[name] / figures[reference]
    return None


def _table_of_steps(lines: list[Line]) -> str:
    header = ["model", "batch", "dtype", "step of", "ms", "/ plain"]
    header += ["/ fastest plain", "/ jax_privacy", "/ its best", "MB", "compile, s"]
    rows = [
        (
            *(x[key] for key in ("task", "batch_size", "dtype")),
            name,
            milliseconds,
            *(_ratio(x, what, name) for what in _OVER),
            x["growth_megabytes"].get(name),
            x["compile_seconds"].get(name),
        )
        for x in lines
        for name, milliseconds in x["milliseconds"].items()
    ]
    return table(header, rows)


def _ratio(line: Line, reference: str, name: str) -> float | None:
    if name.startswith(("torch", "Opacus")):
        reference = f"torch, {reference}"
    return line["time_over"].get(reference, {}).get(name)


def _absences(lines: list[Line]) -> str:
    """What was not measured, in words."""
    pairs = {
        f"{x['task']}: {name} ({reason})"
        for x in lines
        for name, reason in {**x["absent"], **x["refused"]}.items()
    }
    return " Not measured: " + "; ".join(sorted(pairs)) + "." if pairs else ""


def _precision() -> str:
    lines = read("precision", "task", "step", "batch_size", "device")
    rows = [
        (
            x["device"].partition(",")[0],
            x["task"],
            x["batch_size"],
            x["step"],
            policy,
            milliseconds,
            x["speed_up"][policy],
            x["memory_saved"][policy],
        )
        for x in lines
        for policy, milliseconds in x["milliseconds"].items()
    ]
    header = ["processor", "model", "batch", "step of", "policy", "ms", "speed-up"]
    header += ["memory saved"]
    return section(
        "Precision",
        "Whole steps under the policies of dpmp, in turn: the speed-up over the same "
        "step in float32, and the share of its temporary memory that is saved. A "
        "device without products in float16 or float8 widens their operands first.",
        "precision",
        lines,
        table(header, rows),
    )


def _parts() -> str:
    lines = read("parts", "task", "dtype", "engine")
    names = list(lines[0]["share"])
    rows = [
        (
            x["task"],
            x["dtype"],
            x["engine"],
            x["milliseconds"]["plain"],
            *map(x["part_milliseconds"].get, names),
            x["milliseconds"]["noise alone"],
            x["milliseconds"]["Adam alone"],
        )
        for x in lines
    ]
    header = ["model", "dtype", "engine", "plain gradient", *names[:-1], "Adam"]
    return section(
        "Parts of a step",
        "Milliseconds of a plain gradient, and of the parts of a private step: each is "
        "what a program takes more than the one that ends before this part. Batches "
        f"have {lines[0]['batch_size']} examples, in microbatches of "
        f"{lines[0]['microbatch_size']}.",
        "parts",
        lines,
        table([*header, "noise alone", "Adam alone"], rows),
    )


def _growth() -> str:
    lines = read("growth", "axis")
    names = list(lines[0]["exponents"])
    rows = [
        (x["axis"], *map(x["exponents"].get, names), *map(_ends(x).get, names))
        for x in lines
    ]
    header = ["more", *(f"{name}, exponent" for name in names)]
    sizes = "; ".join(
        f"{x['axis']} {x['points'][0]['size']} to {x['points'][-1]['size']}"
        for x in lines
    )
    return section(
        "Growth",
        "How time follows one size of a model while the others stay: an exponent of 1 "
        "is proportional, 0 is not at all. The last columns have milliseconds for the "
        f"smallest and the largest size ({sizes}).",
        "growth",
        lines,
        table([*header, *(f"{name}, ms" for name in names)], rows),
    )


def _ends(line: Line) -> dict[str, str]:
    first, last = (line["points"][i]["milliseconds"] for i in (0, -1))
    return {name: f"{first[name]:.3g} to {last[name]:.3g}" for name in first}


def _accountant() -> str:
    lines = read("accountant", "setting")
    rows = [
        (
            f"{x['iterations']:,} steps of {x['sampling_prob']}",
            *x["seconds"].values(),
            x["values"]["epsilon, dpmp"] / x["values"]["epsilon, directly"] - 1,
            x["values"]["calibration, dpmp"] / x["values"]["calibration, directly"] - 1,
        )
        for x in lines
    ]
    header = ["run", *(f"{name}, s" for name in lines[0]["seconds"])]
    return section(
        "Accounting",
        "Seconds to compute epsilon and to calibrate the noise, by `dpmp.accounting` "
        "and by the defaults of dp_accounting, which does the analysis for both. The "
        "last columns say by which share the results of dpmp are above the others.",
        "accountant",
        lines,
        table([*header, "epsilon above", "noise above"], rows),
    )


def _largest_batch() -> str:
    lines = read("largest_batch", "task", "dtype", "gigabytes")
    names = list(lines[0]["largest_batch"])
    rows = [
        (x["task"], x["dtype"], x["gigabytes"], *map(x["largest_batch"].get, names))
        for x in lines
    ]
    return section(
        "Largest batch at once",
        "The most examples whose clipped sum fits into a given memory at once, by the "
        "compiler's account of parameters, results and temporaries.",
        "largest_batch",
        lines,
        table(["model", "dtype", "gigabytes", *names], rows),
    )


def _import_time() -> str:
    (line,) = read("import_time")
    absent = f" Not installed: {', '.join(line['absent'])}." if line["absent"] else ""
    rows = [(name, x, *line["range"][name]) for name, x in line["seconds"].items()]
    return section(
        "Importing",
        f"Seconds to import a library in a process that has imported jax.{absent}",
        "import_time",
        [line],
        table(["library", "median", "least", "most"], rows),
    )


_SECTIONS = {
    "side_by_side": _side_by_side,
    "precision": _precision,
    "parts": _parts,
    "growth": _growth,
    "accountant": _accountant,
    "largest_batch": _largest_batch,
    "import_time": _import_time,
}
