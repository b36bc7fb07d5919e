"""What the fine-tuning examples share: checks of their flags, and the report."""

import argparse
import pathlib
import tempfile
from typing import Any

import dpmp

COMPARE_HELP = (
    "also train without privacy, and report the loss; for public data only, because "
    "nothing protects the records from that loss"
)


def positive(text: str) -> float:
    """A number above 0, from the text of a flag."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0; got {text}.")
    return number


def check_delta(delta: float, num_examples: int) -> None:
    """Stops if delta would allow that a record is published."""
    if delta * num_examples >= 1:
        raise SystemExit(
            f"--delta must be below 1 / {num_examples}, the number of private "
            f"records; got {delta}."
        )


def check_output(output: pathlib.Path) -> None:
    """Stops before any training if results could not be saved at the end."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise SystemExit(
            f"--output must be a directory that can be written to; got {output} "
            f"({error.strerror})."
        ) from None


def statement(
    args: argparse.Namespace, mechanism: dpmp.DPSGD, num_held_out: int
) -> str:
    """The privacy statement, with what it does not say of printed losses."""
    text = (
        f"{mechanism.statement()}\n"
        f"- Held out: {num_held_out} records, used for evaluation only and treated as\n"
        "  public. The losses for them, printed and reported, are not protected.\n"
    )
    if args.compare:
        text += (
            "- Compared: a model is also trained on these records without privacy.\n"
            "  Its loss is printed and reported without any protection.\n"
        )
    return text


def describe(
    args: argparse.Namespace, mechanism: dpmp.DPSGD, num_held_out: int, **results: Any
) -> dict[str, Any]:
    """What was done, what it guarantees and what came out, for report.json.

    The report may be published, so that it has no path of this machine.
    """
    settings = {
        name: value
        for name, value in vars(args).items()
        if not isinstance(value, pathlib.Path)
    }
    return {
        "is_private": mechanism.is_private,
        "epsilon": mechanism.guarantee().epsilon if mechanism.is_private else None,
        "delta": mechanism.delta,
        "neighboring_relation": mechanism.neighboring_relation.name,
        "statement": statement(args, mechanism, num_held_out),
        "num_examples": mechanism.num_examples,
        "expected_batch_size": mechanism.expected_batch_size,
        "noise_multiplier": mechanism.noise_multiplier,
        **results,
        "settings": settings,
    }
