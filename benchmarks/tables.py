"""The sections of benchmarks/README.md; see `benchmarks/report.py`."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import language_model_tables, step_tables, utility_tables
from benchmarks.markdown import Line, by_device, read, section, table

_QUESTIONS = {
    "clip_and_sum": "clip and sum 64 gradients of a million entries",
    "clipped_grad": "the same with the gradients of an MLP",
    "step": "a training step of a transformer",
    "noise": "noise for ten million entries",
}


def sections() -> list[str]:
    """All sections, in their order on the page."""
    return [
        *step_tables.sections(),
        _clipping(),
        _exactness_cost(),
        _book_keeping(),
        _compile_time(),
        _sampling(),
        _prefetch(),
        _long_runs(),
        _accuracy(),
        *utility_tables.sections(),
        *language_model_tables.sections(),
        _products(),
        _selfcheck(),
        _gpu(),
        _scaling(),
    ]


def _clipping() -> str:
    lines = read("clipping", "task", "dtype", "microbatch_size")
    rows = [
        (
            x["task"],
            x["dtype"],
            x["microbatch_size"] or "all",
            x["time_ratio"]["jax_privacy, float32"],
            x["time_ratio"]["plain gradient"],
            x["memory_ratio"]["jax_privacy, float32"],
        )
        for x in lines
    ]
    header = ["model", "dtype", "microbatch", "time / jax_privacy"]
    header += ["time / plain gradient", "memory / jax_privacy"]
    return section(
        "Clipped gradients",
        "`clipped_grad` with per-example gradients and float32 sums, next to "
        "`jax_privacy.clipping.clipped_grad` with `dtype=float32`. The MLP has a batch "
        "of 64, the transformer of 32.",
        "clipping",
        lines,
        table(header, rows),
    )


def _exactness_cost() -> str:
    lines = read("exactness_cost", "question", "dtype", "device")
    order = list(_QUESTIONS)
    lines.sort(key=lambda x: (order.index(x["question"]), x["dtype"]))
    rows = [
        (
            _QUESTIONS[x["question"]],
            x["dtype"],
            x["device"].partition(",")[0],
            *(x["time_ratio"].get(name) for name in ("exact", "fine")),
            *(x["memory_ratio"].get(name) for name in ("exact", "fine")),
        )
        for x in lines
    ]
    header = ["what", "dtype", "processor", "time, exact", "fine grid"]
    header += ["memory, exact", "fine grid"]
    return section(
        "What exactness costs",
        "Time and temporary memory of exact sums, of exact sums on a grid of 2^20 "
        'units ("fine"), over those of float32 sums. Noise is '
        "compared with `jax.random.normal`, for ten million entries.",
        "exactness_cost",
        lines,
        table(header, rows),
    )


def _book_keeping() -> str:
    lines = read("book_keeping", "task", "dtype", "batch_size", question="step")
    peers = ("plain", "best without privacy", "jax_privacy, at once")
    rows = [
        (
            x["task"],
            x["batch_size"],
            x["dtype"],
            name.removeprefix("dpmp").strip(", "),
            *(ratios.get(peer) for peer in (*peers, "jax_privacy, best")),
            x["memory_ratio"].get(name),
        )
        for x in lines
        for name, ratios in x["time_ratio"].items()
        if name.startswith("dpmp")
    ]
    header = ["model", "batch", "dtype", "book-keeping in parts of"]
    header += ["time / plain training", "/ fastest without privacy"]
    header += ["/ jax_privacy", "/ its best microbatch", "memory / plain training"]
    return section(
        "Book-keeping",
        "A clipped sum by book-keeping, next to the gradient of the mean loss. Where "
        "book-keeping is faster than plain training, that is because XLA's compiler "
        "for CPUs is slow at products with a bfloat16 result, which book-keeping "
        'avoids. "Fastest without privacy" avoids them too, and takes the best of all '
        "examples at once and microbatches of 8.",
        "book_keeping --question step",
        lines,
        table(header, rows),
    )


def _compile_time() -> str:
    lines = read("compile_time", "task")
    names = ("float32", "exact", "book-keeping, bounded")
    rows = [
        (
            x["task"],
            *(x["figures"][name]["lines_per_array"] for name in names),
            *(x["figures"][name]["time_ratio"] for name in names),
        )
        for x in lines
        if "lines_per_array" in x["figures"].get("exact", {})
    ]
    header = ["clipped sum of", *(f"lines, {name}" for name in names)]
    header += [f"time, {name}" for name in names]
    return section(
        "Compilation",
        "Lines of the program for each array of parameters, beyond the plain "
        "gradient's, and the time to trace and compile, over jax_privacy's.",
        "compile_time",
        lines,
        table(header, rows),
    )


def _sampling() -> str:
    lines = read("sampling", "num_examples", "sampling_prob")
    names = ("dpmp", "a word for each example")
    rows = [
        (
            f"{x['num_examples']:,}",
            x["sampling_prob"],
            *(
                1e3 * x["seconds"][name] if name in x["seconds"] else None
                for name in names
            ),
            *(x["megabytes"].get(name) for name in names),
            1e3 * x["table_seconds"],
        )
        for x in lines
    ]
    header = ["examples", "probability"]
    header += [f"milliseconds, {name}" for name in names]
    header += [f"megabytes, {name}" for name in names]
    header += ["milliseconds, once in a run"]
    return section(
        "Drawing a batch",
        "`PoissonSampling.indices`, next to drawing 64 random bits for each example. "
        "Time and memory follow the size of the batch, not that of the dataset.",
        "sampling",
        lines,
        table(header, rows),
    )


def _prefetch() -> str:
    lines = read("prefetch", "loading_milliseconds", "device_milliseconds")
    names = list(lines[0]["step_milliseconds"])
    header = ["loading a batch", "waiting for the device", *names]
    rows = [
        (
            x["loading_milliseconds"],
            x["device_milliseconds"],
            *map(x["step_milliseconds"].get, names),
        )
        for x in lines
    ]
    return section(
        "Loading in the background",
        "Milliseconds of a step of `DPTrainer.fit` with a tiny model.",
        "prefetch",
        lines,
        table(header, rows),
    )


def _long_runs() -> str:
    cost = read("long_runs", "batch_size", question="files")
    resumed = read("long_runs", "parameters", question="going on")
    costs = [
        (
            x["batch_size"],
            x["steps_of_a_round"],
            x["step_seconds"]["plain"],
            *(100 * (x["time_ratio"][name] - 1) for name in ("progress", "directory")),
            x["release_seconds"],
        )
        for x in cost
    ]
    header = ["batch", "steps for a release", "seconds for a step"]
    header += ["progress, %", "directory, %", "a release, s"]
    times = [(x["parameters"], x["megabytes"], *x["seconds"].values()) for x in resumed]
    names = ["read", "until the first release", "a step", "a release"]
    return section(
        "Long runs",
        "What progress and a directory (checkpoint, ledger and metrics) add to a run "
        "of the model of `examples/finetune_transformer.py`, with a release more often "
        "than by default. The time to compute epsilon is included, once for a run. The "
        "second table has the seconds to save a model, and to go on from the files "
        "with a program that has to be compiled.",
        "long_runs",
        [*cost, *resumed],
        table(header, costs),
        table(["parameters", "megabytes", *names], times),
    )


def _accuracy() -> str:
    lines = read("accuracy_by_precision", "task", "row", "is_private", "seed")
    tasks = list(dict.fromkeys((x["task"], x["metric"]) for x in lines))
    columns = [(*task, private) for task in tasks for private in (True, False)]

    def mean(row: str, task: str, metric: str, is_private: bool) -> str:
        wanted = (row, task, metric, is_private)
        scores = [
            x["score"]
            for x in lines
            if (x["row"], x["task"], x["metric"], x["is_private"]) == wanted
        ]
        if not scores:
            return ""
        low, high = min(scores), max(scores)
        return f"{statistics.mean(scores):.3f} ({low:.3f} to {high:.3f})"

    rows = [
        (row, *(mean(row, *column) for column in columns))
        for row in dict.fromkeys(x["row"] for x in lines)
    ]
    header = ["precision"] + [
        f"{task}, {metric}, {'private' if private else 'not private'}"
        for task, metric, private in columns
    ]
    return section(
        "Accuracy by precision",
        "The mean over seeds and its range, at epsilon 8, and the same without "
        "clipping and noise. The loss is weighted as in a mean over many tokens, so "
        "that float16 without a scale loses gradients.",
        "accuracy_by_precision",
        lines,
        table(header, rows),
    )


def _products() -> str:
    lines = read("dtype_matmul", "product")
    names = list(dict.fromkeys(name for x in lines for name in x["time_ratio"]))
    rows = [(x["product"], *map(x["time_ratio"].get, names)) for x in lines]
    return section(
        "Products by dtype",
        "The time of a product of matrices, over that in float32. An arrow names the "
        "dtype of the result.",
        "dtype_matmul",
        lines,
        table(["product", *names], rows),
    )


def _selfcheck() -> str:
    lines = read("selfcheck_others", "measurement", "device")
    return section(
        "The self-check, with other libraries",
        "The measurements of `python -m dpmp selfcheck`, applied to dpmp, to its "
        "floating-point noise (which nobody should use), to jax_privacy and to Opacus. "
        "Limits differ a little from column to column; the first one is shown. "
        "Book-keeping (bounded) promises nothing of batches whose examples change "
        "places, so these are left out for it.",
        "selfcheck_others",
        lines,
        *(
            f"### On {device}\n\n{_table_of_checks(some)}"
            for device, some in by_device(lines).items()
        ),
    )


def _table_of_checks(lines: list[Line]) -> str:
    subjects = list(dict.fromkeys(r["subject"] for x in lines for r in x["results"]))

    def row(line: Line) -> Sequence[Any]:
        results = {r["subject"]: r for r in line["results"]}
        limits = [
            f"at least {r['at_least']:.3g}" for r in results.values() if r["at_least"]
        ]
        limits += [
            f"at most {r['at_most']:.3g}" for r in results.values() if r["at_most"]
        ]
        values = (
            f"{results[name]['value']:.4g}" if name in results else ""
            for name in subjects
        )
        return [line["measurement"], limits[0] if limits else "", *values]

    return table(["measurement", "allowed", *subjects], map(row, lines))


def _gpu() -> str:
    lines = read("gpu_programs", "task", "dtype", "batch_size", question="memory")
    names = [name for name in lines[0]["memory_ratio"] if name != "plain"]
    rows = [(x["task"], x["dtype"], *map(x["memory_ratio"].get, names)) for x in lines]
    programs = read("gpu_programs", "name", question="program")
    compiled = [
        (x["name"], x["compile_seconds"], x["temp_megabytes"]) for x in programs
    ]
    return section(
        "Programs for a GPU",
        "Nothing has been timed on a GPU yet. These programs were compiled for an "
        "NVIDIA H100, without one: temporary memory over that of plain training, for "
        "batches of 64. `python -m benchmarks.gpu` measures on a GPU in under twenty "
        "minutes.",
        "gpu_programs",
        [*lines, *programs],
        table(["model", "dtype", *names], rows),
        table(["program", "seconds to compile", "temporary megabytes"], compiled),
    )


def _scaling() -> str:
    keys = ("compiled_for", "devices", "parameters")
    compiled = read("scaling", *keys, part="compiled", layers=18, length=1024)
    gigabytes = [
        (*map(x.get, keys), *(x[f"bytes_of_{name}"] / 1e9 for name in _HELD))
        for x in compiled
    ]
    timed = read("scaling", "scaling", "processes", "devices", part="measured")
    first = {x["scaling"]: x for x in timed if x["devices"] == x["processes"] == 1}
    rows = [
        (
            x["scaling"],
            x["processes"],
            x["devices"],
            x["batch_size"],
            x["seconds_per_step"],
            x["examples_per_second"] / first[x["scaling"]]["examples_per_second"],
        )
        for x in timed
    ]
    header = ["scaling", "processes", "devices", "batch", "seconds for a step"]
    return section(
        "Many devices",
        "A step of a decoder with a billion parameters, with book-keeping in bfloat16, "
        "Adam and 1024 tokens, compiled for devices that are not there: gigabytes of "
        "each device, and of what its collectives return. The largest of these arrays "
        "is a parameter or its sum; none holds the gradient of an example. Beside its "
        "part of the state, a device holds the gathered parameters (which the CPU's "
        "compiler widens to float32) and the sum of its own examples. The second table "
        "is measured, on virtual devices that share the cores of one machine. Beyond "
        "its number of cores no speed can be gained: the table shows what it costs to "
        "divide the work. Two processes on one machine exchange their sums through "
        "sockets, which takes longer than a step of this small model.",
        "scaling",
        [*compiled, *timed],
        table(["compiled for", *keys[1:], *_HELD], gigabytes),
        table([*header, "examples / second, over one device"], rows),
    )


_HELD = ("state", "temporaries", "collectives")
