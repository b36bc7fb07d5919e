"""What does a product cost, by dtype?

Products of square matrices, one with long sums, those of a layer with weights of
(256, 1024) and of the gradient of these (of 8192 positions, in one axis and in two),
and those of attention, for operands of each dtype and for 16-bit ones with a result of
16 bits and of float32.
Quoted are ratios of time to full float32, taken within rounds. "float32 by default" is
what jax does with float32 operands when it is asked for no precision.

    python -m benchmarks.dtype_matmul        # four or five minutes on two cores

Every line is appended to benchmarks/results/dtype_matmul.jsonl.
"""

import argparse
import math
import statistics
import sys
from typing import Any, NamedTuple

import jax

from benchmarks import results
from dpmp.tools import _timing
from dpmp.tools.devices import _products


class Subject(NamedTuple):
    """Shapes of two operands, and how they are contracted, as in `jnp.einsum`."""

    contraction: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def num_operations(self) -> int:
        """Multiplications and additions."""
        names, _ = self.contraction.split("->")
        pairs = zip(names.split(","), self.shapes, strict=True)
        sizes = {
            i: n for axes, shape in pairs for i, n in zip(axes, shape, strict=True)
        }
        return 2 * math.prod(sizes.values())


SUBJECTS = {
    f"square, {n}": Subject("ij,jk->ik", ((n, n), (n, n)))
    for n in (256, 512, 1024, 2048)
} | {
    "long sums": Subject("ij,jk->ik", ((1024, 65536), (65536, 1024))),
    "layer": Subject("ti,io->to", ((8192, 256), (256, 1024))),
    "gradient of weights": Subject("ti,to->io", ((8192, 256), (8192, 1024))),
    "gradient of weights, of sequences": Subject(
        "bti,bto->io", ((32, 256, 256), (32, 256, 1024))
    ),
    "attention scores": Subject(
        "bqhd,bkhd->bhqk", ((16, 256, 8, 64), (16, 256, 8, 64))
    ),
    "attention values": Subject(
        "bhqk,bkhd->bqhd", ((16, 8, 256, 256), (16, 256, 8, 64))
    ),
}


_FLOAT64 = _products.Kind("float64", "float64", "float64")


def measure(subject: Subject, rounds: int) -> dict[str, dict[str, Any]]:
    """Times all kinds of products that run, and names the others' errors."""
    operands = subject.shapes, subject.contraction
    programs, errors = _products.compile_all(_products.KINDS, *operands)
    with jax.enable_x64(True):
        more = _products.compile_all([_FLOAT64], *operands)
    programs |= more[0]
    errors |= more[1]
    seconds = _timing.in_turn(programs, rounds)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "time_ratio": {
            name: round(_timing.median_ratio(times, seconds["float32"]), 3)
            for name, times in seconds.items()
        },
        "milliseconds": {name: round(1e3 * x, 3) for name, x in medians.items()},
        "gigaoperations_per_second": {
            name: round(subject.num_operations / x / 1e9, 1)
            for name, x in medians.items()
        },
        "refused": errors,
    }


def table(measured: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Ratios of time, with a row for each subject."""
    kinds = [kind.name for kind in (*_products.KINDS, _FLOAT64)][1:]
    header = ["", *kinds]
    rows = [
        [name, *(_cell(figures["time_ratio"].get(kind)) for kind in kinds)]
        for name, figures in measured.items()
    ]
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def main() -> None:
    """Measures what was asked for and appends its figures."""
    parser = argparse.ArgumentParser(description="Times products by dtype.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--subject", choices=SUBJECTS, nargs="*", default=[*SUBJECTS])
    args = parser.parse_args()
    measured = {}
    for name in args.subject:
        subject = SUBJECTS[name]
        measured[name] = measure(subject, args.rounds)
        results.append(
            "dtype_matmul",
            product=name,
            **subject._asdict(),
            rounds=args.rounds,
            **measured[name],
        )
    sys.stdout.write(table(measured))


if __name__ == "__main__":
    main()
