r"""Runs what a GPU is needed for, in under twenty minutes, the most important first.

    python -m benchmarks.gpu                        # all parts
    python -m benchmarks.gpu --part exact bounded --out FOLDER
    python -m benchmarks.gpu --tiny                 # a rehearsal, on any machine

    exact       do exact sums and noise keep their promises, on shapes of real models
    bounded     the same of "bounded" sums, and of the norms of book-keeping
    selfcheck   `python -m dpmp selfcheck`
    tests       the library's tests of its arithmetic, on the device
    products    matrix products by dtype
    small       a training step of GPT-2 small, by engine, arithmetic and library
    medium, large       the same for larger ones
    smollm2     full and LoRA steps of a decoder of the shape of SmolLM2-135M
    decoder     the same for a decoder with a billion parameters
    float8      against bfloat16
    noise       for 2^30 entries

Each part is a process of its own with its own time limit, so that one that hangs,
crashes or runs out of memory leaves the others alone. Every line is written to
FOLDER/gpu.jsonl (benchmarks/results) as soon as it is known, and a last line for each
part says how it ended. Nobody else must use the device, as times are measured.

A machine without a network that has jax, its plugin for CUDA, flax, optax and scipy
lacks dp-accounting, which takes dm-tree, absl-py, attrs, mpmath and wrapt. What is not
there runs from a folder that is filled elsewhere, for the Python of that machine:

    pip install --no-deps --only-binary=:all: --target wheels \
        --python-version 3.12 --platform manylinux_2_28_x86_64 \
        dp-accounting dm-tree absl-py attrs mpmath wrapt
    PYTHONPATH=wheels python -m benchmarks.gpu --out results

For jax_privacy, which is left out where it is missing, it takes jax-privacy, chex,
toolz, pydantic, pydantic-core (of the version that pydantic asks for), annotated-types
and typing-inspection as well.
"""

import argparse
import os
import pathlib
import pkgutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks import harness


class Part(NamedTuple):
    """A part of the benchmark."""

    run: str  # the function of a session, in benchmarks.gpu
    seconds: float  # that it may take
    environment: Mapping[str, str] = {}  # of its process


# The tests are several processes that share the device.
PARTS = {
    "exact": Part("exact_bits:run", 70),
    "bounded": Part("bounded_bits:run", 60),
    "selfcheck": Part("device:run_selfcheck", 90),
    "tests": Part("tests:run", 130, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
    "products": Part("device:run_products", 50),
    "small": Part("steps:run_models", 160),
    "smollm2": Part("steps:run_models", 110),
    "decoder": Part("steps:run_models", 120),
    "medium": Part("steps:run_models", 110),
    "large": Part("steps:run_models", 110),
    "float8": Part("steps:run_float8", 80),
    "noise": Part("device:run_noise", 50),
}
_GRACE = 5.0  # to end by itself, and to write what it has
_DEVICE_IS_MISSING = 3


def main() -> int:
    """Runs the parts that were asked for, or one of them in this process."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="Runs what a GPU is needed for."
    )
    add = parser.add_argument
    add("--part", nargs="+", choices=PARTS, default=[*PARTS])
    add("--out", type=pathlib.Path, default=harness.RESULTS)
    add("--tiny", action="store_true", help="small, on any machine")
    add("--seconds", type=float, help="for each part")
    add("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        return _run_inside(args)
    outcomes = []
    for part in args.part:
        seconds = args.seconds or PARTS[part].seconds
        # Later flags count.
        flags = [*sys.argv[1:], "--part", part, "--seconds", str(seconds), "--inside"]
        command = [sys.executable, "-m", "benchmarks.gpu", *flags]
        environment = {**os.environ, **PARTS[part].environment}
        if args.tiny:
            environment["JAX_PLATFORMS"] = "cpu"
        outcomes.append(run_part(part, command, seconds, args.out, environment))
    return int(any(outcome != "ended" for outcome in outcomes))


def run_part(
    part: str,
    command: Sequence[str],
    seconds: float,
    folder: pathlib.Path,
    environment: Mapping[str, str],
) -> str:
    """Runs the process of a part, ends it in time, and writes how it ended."""
    start = time.monotonic()
    outcome = harness.run_for(command, seconds + _GRACE, env=environment)
    outcome = "ended" if outcome == "exit status 0" else outcome
    seconds = round(time.monotonic() - start, 1)
    figures = {"part": part, "question": "outcome", "outcome": outcome}
    harness.write_line(folder, "gpu", {**figures, "seconds": seconds})
    print(f"{part}: {outcome}", flush=True)
    return outcome


def _run_inside(args: argparse.Namespace) -> int:
    """Runs one part here."""
    import jax

    from benchmarks.gpu.programs import Session

    (part,) = args.part
    if not args.tiny and jax.default_backend() == "cpu":
        sys.stderr.write(
            "This benchmark needs a GPU; jax finds only a CPU. "
            "Use --tiny to rehearse it.\n"
        )
        return _DEVICE_IS_MISSING
    session = Session(
        part=part,
        folder=args.out,
        seconds=args.seconds,
        is_tiny=args.tiny,
    )
    pkgutil.resolve_name(f"benchmarks.gpu.{PARTS[part].run}")(session)
    return 0


if __name__ == "__main__":
    sys.exit(main())
