"""How long does it take to import a library, beyond importing jax?

Each import is made in a process of its own, which imports jax first. The libraries take
turns. Quoted are medians of seconds.

    python -m benchmarks.import_time        # two minutes on two cores
"""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks import harness

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


def benchmark(rounds: int) -> Iterator[dict[str, Any]]:
    """A line for all libraries that are installed."""
    found = {
        name: modules
        for name, modules in LIBRARIES.items()
        if harness.is_installed(modules[0].partition(".")[0])
    }
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for i in range(rounds + 1):
        for name, modules in found.items():
            taken = seconds_to_import(modules)
            if i:  # the first round reads files from the disk
                seconds[name].append(taken)
    yield {
        "rounds": rounds,
        "seconds": harness.rounded(harness.medians(seconds), 2),
        "range": {k: [round(min(x), 2), round(max(x), 2)] for k, x in seconds.items()},
        "absent": sorted({*LIBRARIES} - {*found}),
    }


if __name__ == "__main__":
    harness.main(benchmark, tiny={"rounds": 1}, rounds=7)
