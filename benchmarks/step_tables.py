"""Tables of whole steps and of their parts; see `benchmarks/report.py`."""

from benchmarks.markdown import Line, has_lines, read, section, table

_OVER = ("plain", "fastest plain", "jax_privacy, at once", "jax_privacy, best")


def sections() -> list[str]:
    """The sections that have lines."""
    return [make() for name, make in _SECTIONS.items() if has_lines(name)]


def _side_by_side() -> str:
    lines = read("side_by_side", "task", "dtype", "batch_size")
    rows = [
        (
            x["task"],
            x["batch_size"],
            x["dtype"],
            name,
            milliseconds,
            *(_ratio(x, what, name) for what in _OVER),
            x["growth_megabytes"].get(name),
            x["compile_seconds"].get(name),
        )
        for x in lines
        for name, milliseconds in x["milliseconds"].items()
    ]
    header = ["model", "batch", "dtype", "step of", "ms", "time / plain"]
    header += ["/ fastest plain", "/ jax_privacy", "/ its best", "MB", "compile, s"]
    return section(
        "Side by side",
        "Whole training steps: gradients, clipping, noise and Adam. The steps of "
        "PyTorch and Opacus are compared with PyTorch's plain step, all others with "
        'that of jax. A number at the end of a name is the microbatch size. "MB" is '
        "by how much the process grows in a step, beside parameters and optimizer."
        + _absences(lines),
        "side_by_side",
        lines,
        table(header, rows),
    )


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


_SECTIONS = {"side_by_side": _side_by_side}
