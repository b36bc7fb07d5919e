"""Tables of the benchmarks of language models; see `benchmarks/tables.py`."""

from benchmarks.markdown import read, section, table


def sections() -> list[str]:
    """The sections."""
    return [_lora()]


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
