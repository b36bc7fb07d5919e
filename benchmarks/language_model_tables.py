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
    lines = read("dp_adam", "optimizer", "learning_rate")
    rates = sorted({x["learning_rate"] for x in lines})
    names = list(dict.fromkeys(x["optimizer"] for x in lines))
    rows = [[rate, *(_spread(lines, name, rate) for name in names)] for rate in rates]
    return section(
        "Adam that knows the noise",
        f"Nats per byte after private fine-tuning of a small transformer at epsilon "
        f"{lines[0]['epsilon']:g}, of three seeds: the mean, and the largest distance "
        f"from it. Before, it was {lines[0]['nats_per_byte_before']:.3f}.",
        "dp_adam",
        lines,
        table(["learning rate", *names], rows),
    )


def _spread(lines: Sequence[Line], name: str, rate: float) -> str | None:
    for x in lines:
        if (x["optimizer"], x["learning_rate"]) == (name, rate):
            most = max(abs(value - x["mean"]) for value in x["nats_per_byte"])
            return f"{x['mean']:.3f} ± {most:.3f}"
    return None
