"""Tables of accuracy at equal epsilon; see `benchmarks/report.py`."""

import statistics
from collections.abc import Sequence

from benchmarks.markdown import Line, has_lines, read, section, table


def sections() -> list[str]:
    """The sections that have lines."""
    return [make() for name, make in _SECTIONS.items() if has_lines(name)]


def _utility() -> str:
    lines = read("utility", "data", "library", "epsilon")
    lines = [x for x in lines if "accuracy" in x]
    by_data = [
        [x for x in lines if x["data"] == name]
        for name in dict.fromkeys(x["data"] for x in lines)
    ]
    numbers = " and then ".join(
        f"{x[0]['num_examples']} images of {x[0]['data']}" for x in by_data
    )
    return section(
        "Accuracy at equal epsilon",
        "A network with one hidden layer on handwritten digits, trained by each "
        "library from the same parameters with the same noise multiplier, clip norm, "
        f"probability of sampling and optimizer: {numbers}. Quoted are means of "
        f"{_num_seeds(lines)} seeds, with the standard error of the mean.",
        "utility",
        lines,
        *(
            _by_library(some, "epsilon", value)
            for some in by_data
            for value in ("accuracy", "loss")
        ),
    )


def _spam_filter() -> str:
    lines = read("spam_filter", "trained", "library", "epsilon")
    lines = [x for x in lines if "accuracy" in x]
    heads, adapters = (
        [x for x in lines if x["trained"] == kind] for kind in ("head", "lora")
    )
    texts = [
        "A filter of e-mails on the vectors of all-MiniLM-L6-v2, with the same "
        f"settings in both libraries: accuracy on {lines[0]['held_out']} held-out "
        f"e-mails, of which {lines[0]['held_out_spam']} are spam, as means of "
        f"{_num_seeds(lines)} seeds with the standard error of the mean. The first "
        "table trains a linear head alone."
    ]
    tables = [_by_library(heads, "epsilon", "accuracy")]
    if adapters:
        settings = adapters[0]["settings"]
        texts.append(
            f"The second one trains adapters too, but in {settings['steps']} steps of "
            f"{settings['batch_size']} e-mails: longer training takes long on a CPU."
        )
        tables.append(_by_library(adapters, "epsilon", "accuracy"))
    title = "A private spam filter"
    return section(title, " ".join(texts), "spam_filter", lines, *tables)


def _num_seeds(lines: Sequence[Line]) -> str:
    numbers = sorted({len(x["accuracy"]) for x in lines})
    return " to ".join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))


def _by_library(lines: Sequence[Line], row: str, value: str) -> str:
    names = list(dict.fromkeys(x["library"] for x in lines))
    cells = {(x[row], x["library"]): mean_with_error(x[value]) for x in lines}
    rows = [
        ["none" if key is None else f"{key:g}", *(cells.get((key, x)) for x in names)]
        for key in dict.fromkeys(x[row] for x in lines)
    ]
    return table([row, *(f"{value}, {name}" for name in names)], rows)


def mean_with_error(values: Sequence[float]) -> str:
    """The mean with its standard error, if there are several values."""
    mean = statistics.fmean(values)
    if len(values) == 1:
        return f"{mean:.3f}"
    return f"{mean:.3f} ± {statistics.stdev(values) / len(values) ** 0.5:.3f}"


def _emails() -> str:
    lines = read("emails", "settings")
    rows = [
        (
            f"{x['settings']['steps']} of {x['settings']['batch_size']}",
            x["settings"]["seed"],
            *(f"{y:.3f}" for y in x["nats_per_token"].values()),
        )
        for x in lines
    ]
    return section(
        "Fine-tuning on e-mails",
        f"Nats per token of {lines[0]['model']} on held-out e-mails, before and after "
        f"fine-tuning by LoRA on {lines[0]['num_examples']} others, at epsilon "
        f"{lines[0]['epsilon']:.2g} and delta {lines[0]['delta']:g}, and without "
        "privacy.",
        "emails",
        lines,
        table(["steps", "seed", *lines[0]["nats_per_token"]], rows),
    )


_SECTIONS = {
    "utility": _utility,
    "spam_filter": _spam_filter,
    "emails": _emails,
}
