"""Tables of the benchmarks of language models; see `benchmarks/tables.py`."""

from collections.abc import Sequence

from benchmarks.markdown import Line, read, section, table


def sections() -> list[str]:
    """The sections."""
    return [_lora(), _dp_adam()]


def _lora() -> str:
    (step,) = read("lora", "model", question="step")
    full = read("lora", "microbatch_size", question="full")
    columns = ("milliseconds", "time_ratio", "megabytes", "compile_ratio")
    rows = [
        (name, *(step[column][name] for column in columns))
        for name in step["milliseconds"]
    ]
    whole = [
        (x["microbatch_size"], x["gigabytes"], x["temporary_gigabytes"]) for x in full
    ]
    return section(
        "LoRA and full fine-tuning of a language model",
        f"{step['model']} in bfloat16, {step['batch_size']} records of "
        f"{step['length']} tokens. The first table has steps of LoRA of rank "
        f"{step['rank']} in all matrices, which is {step['trained_share']:.1%} of the "
        "parameters, over the mean gradient without privacy. Megabytes include the "
        "frozen model. Most time "
        "goes into the frozen matrices, which both engines multiply with in the "
        "same way. The second table has compiled steps of `DPTrainer` for all "
        "parameters, by book-keeping with Adam and rematerialised layers.",
        "lora",
        [step, *full],
        table(["step", "ms", "time ratio", "MB", "compile ratio"], rows),
        table(["microbatch", "GB", "of it temporary"], whole),
    )


def _dp_adam() -> str:
    lines = read("dp_adam", "model", "optimizer", "learning_rate")
    models = dict.fromkeys(x["model"] for x in lines)
    found = {name: [x for x in lines if x["model"] == name] for name in models}
    texts = {
        "transformer": "A small transformer",
        "smollm2": "Adapters of SmolLM2-135M",
    }
    sentences = (
        f"{texts[name]}: {x['unit']} after {x['steps']} private steps of "
        f"{x['batch_size']} records at epsilon {x['epsilon']:g}; {x['before']:.3f} "
        f"before; {len(x['losses'])} seeds."
        for name, (x, *_) in found.items()
    )
    return section(
        "Adam that knows the noise",
        "The mean over the seeds, and the largest distance from it. "
        + " ".join(sentences),
        "dp_adam",
        lines,
        *map(_by_rate, found.values()),
    )


def _by_rate(lines: Sequence[Line]) -> str:
    rates = sorted({x["learning_rate"] for x in lines})
    names = list(dict.fromkeys(x["optimizer"] for x in lines))
    rows = [[rate, *(_spread(lines, name, rate) for name in names)] for rate in rates]
    return table(["learning rate", *names], rows)


def _spread(lines: Sequence[Line], name: str, rate: float) -> str | None:
    for x in lines:
        if (x["optimizer"], x["learning_rate"]) == (name, rate):
            most = max(abs(value - x["mean"]) for value in x["losses"])
            return f"{x['mean']:.3f} ± {most:.3f}"
    return None
