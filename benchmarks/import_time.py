"""How long does it take to import a library, beyond importing jax?

Each import is made in a process of its own, which imports jax first. The libraries take
turns. Quoted are medians of seconds.

    python -m benchmarks.import_time        # two minutes on two cores

Every line is appended to benchmarks/results/import_time.jsonl.
"""

import argparse
import importlib.util
import pathlib
import statistics
import subprocess
import sys

from benchmarks import results

# What people import to train privately.
LIBRARIES = {
    "dpmp": ("dpmp",),
    "jax_privacy": ("jax_privacy.clipping", "jax_privacy.noise_addition"),
    "dp_accounting": ("dp_accounting",),
    "Opacus": ("opacus",),
}
_PROGRAM = """
import importlib, sys, time
import jax, jax.numpy
start = time.perf_counter()
for name in sys.argv[1:]:
    importlib.import_module(name)
print(time.perf_counter() - start)
"""


def seconds_to_import(modules: tuple[str, ...]) -> float:
    """Seconds in a new process that has imported jax."""
    command = [sys.executable, "-W", "ignore", "-c", _PROGRAM, *modules]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    """Times the libraries that are installed."""
    parser = argparse.ArgumentParser(description="Times imports.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=pathlib.Path, default=results.RESULTS)
    args = parser.parse_args()
    found = {
        name: modules
        for name, modules in LIBRARIES.items()
        if importlib.util.find_spec(modules[0].split(".")[0])
    }
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(args.rounds + 1):
        for name, modules in found.items():
            seconds[name].append(seconds_to_import(modules))
    results.append_to(
        args.out,
        "import_time",
        rounds=args.rounds,
        # The first round reads files from the disk.
        seconds={k: round(statistics.median(x[1:]), 2) for k, x in seconds.items()},
        range={
            k: [round(min(x[1:]), 2), round(max(x[1:]), 2)] for k, x in seconds.items()
        },
        absent=sorted({*LIBRARIES} - {*found}),
    )


if __name__ == "__main__":
    main()
